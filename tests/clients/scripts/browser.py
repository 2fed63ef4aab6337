"""The pages in headless Chromium: python browser.py URL KEYED_URL FOLDER

Talks to the scripted model like a user, and leaves screenshots in FOLDER. KEYED_URL is a server
that asks for the API key "secret".
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

TOOLS = '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; })
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const bad = [];
  for (const each of document.querySelectorAll('body *')) {
    const own = [...each.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !each.checkVisibility() || each.closest('.hidden')) continue;
    let at = each, back = null;
    while (at && !back) { const c = parse(getComputedStyle(at).backgroundColor); if (c.length < 4 || c[3] > 0) back = c; at = at.parentElement; }
    const [a, b] = [light(parse(getComputedStyle(each).color)), light(back ?? [255, 255, 255])].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) bad.push(`${each.tagName} ${each.textContent.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return bad;
}"""
UNNAMED = """() => [...document.querySelectorAll('button, input, textarea, select, meter, a, svg[role=img]')]
  .filter((e) => !(e.labels?.length || e.getAttribute('aria-label') || e.textContent.trim()))
  .map((e) => e.outerHTML.slice(0, 80))"""


def open_page(browser: Browser, url: str, path: str = "/", **options) -> tuple[Page, list[str]]:
    """A page, and what went wrong on it."""
    problems: list[str] = []
    page = browser.new_context(**options).new_page()
    page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda r: None if r.url.startswith(url) else problems.append(f"fetched {r.url}"))
    page.goto(url + path)
    return page, problems


def say(page: Page, words: str) -> None:
    page.get_by_label("Message").fill(words)
    page.get_by_role("button", name="Send", exact=True).click()


def done(page: Page, turns: int) -> None:
    expect(page.locator(".turn.assistant")).to_have_count(turns)
    expect(page.locator(".turn[aria-busy]")).to_have_count(0, timeout=30_000)


def accessible(page: Page) -> None:
    assert page.evaluate(UNNAMED) == []
    assert page.evaluate(CONTRAST) == []
    wide = page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
    assert not wide, "the page scrolls sideways"


def chat(browser: Browser, url: str, folder: Path, scheme: str) -> None:
    page, problems = open_page(browser, url, color_scheme=scheme, viewport={"width": 1280, "height": 820})
    expect(page.locator("#state")).to_have_text("ready")
    accessible(page)
    page.screenshot(path=folder / f"empty-{scheme}.png")
    say(page, "hello")
    done(page, 1)
    expect(page.locator(".turn.assistant .body")).to_contain_text("Hello! 😀 How can I help you today?")
    thoughts = page.locator(".turn.assistant details").first
    thoughts.locator("summary").click()
    expect(thoughts.locator(".thought")).to_have_text("The user wants something.")
    say(page, "repeat: ## Colors\n\n- **red**\n- `blue`\n\n```python\nprint('<b>not bold</b>')\n```\n\nSee [here](https://example.org) or [there](javascript:alert(1)).")
    done(page, 2)
    body = page.locator(".turn.assistant .body").nth(1)
    expect(body.locator("li")).to_have_count(2)
    expect(body.locator("pre")).to_have_text("print('<b>not bold</b>')")
    expect(body.locator("a")).to_have_count(1)
    expect(body.locator("b")).to_have_count(0)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Tools (JSON array)").fill("[")
    page.get_by_role("button", name="Done").click()
    expect(page.get_by_role("alert")).to_be_visible()
    page.get_by_label("Tools (JSON array)").fill(TOOLS)
    page.get_by_label("System prompt").fill("Be kind.")
    accessible(page)
    page.screenshot(path=folder / f"settings-{scheme}.png")
    page.get_by_role("button", name="Done").click()
    say(page, 'call weather with {"city": "Oslo"}')
    done(page, 3)
    call = page.locator(".call")
    expect(call).to_contain_text("weather")
    expect(call).to_contain_text('"city": "Oslo"')
    page.get_by_label("Result of weather").fill("7 degrees")
    page.screenshot(path=folder / f"tools-{scheme}.png")
    page.get_by_role("button", name="Send results").click()
    done(page, 4)
    expect(page.locator(".turn.assistant .body").nth(3)).to_have_text("The tool says: 7 degrees")
    say(page, "count")
    expect(page.locator(".turn.assistant .body").nth(4)).to_contain_text("1 2 3")
    page.get_by_role("button", name="Stop").click()
    done(page, 5)
    expect(page.locator(".turn.assistant .foot").nth(4)).to_contain_text("stopped")
    expect(page.locator("#finished")).not_to_have_text("0")
    accessible(page)
    page.screenshot(path=folder / f"chat-{scheme}.png")
    page.get_by_role("button", name="Switch between light and dark").click()
    other = "light" if scheme == "dark" else "dark"
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == other
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)
    page.reload()
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == other
    assert problems == [], problems


def phone(browser: Browser, url: str, folder: Path) -> None:
    page, problems = open_page(browser, url, color_scheme="light", **PHONE)
    expect(page.locator("#state")).to_have_text("ready")
    say(page, "hello")
    done(page, 1)
    accessible(page)
    page.screenshot(path=folder / "phone-chat.png")
    expect(page.get_by_role("complementary")).to_be_hidden()
    page.get_by_role("button", name="Server").tap()
    expect(page.get_by_role("complementary")).to_be_visible()
    expect(page.locator("#running")).to_contain_text("of 8")
    accessible(page)
    page.screenshot(path=folder / "phone-server.png")
    assert problems == [], problems


def keyed(browser: Browser, url: str, folder: Path) -> None:
    page, problems = open_page(browser, url, color_scheme="dark", viewport={"width": 900, "height": 700})
    expect(page.get_by_role("alert")).to_have_text("The server asks for an API key.")
    page.screenshot(path=folder / "key.png")
    page.get_by_label("API key").fill("secret")
    page.get_by_role("button", name="Done").click()
    expect(page.locator("#state")).to_have_text("ready")
    say(page, "hello")
    done(page, 1)
    expect(page.locator(".turn.assistant .body")).to_contain_text("Hello!")
    page.goto(url + "/docs")  # in the same tab: the key is still there
    expect(page.locator("details").first).to_be_visible()
    assert all("401" in each for each in problems), problems


def described(browser: Browser, url: str, folder: Path) -> None:
    page, problems = open_page(browser, url, "/docs", color_scheme="light", viewport={"width": 1100, "height": 900})
    expect(page.locator("summary", has_text="/v1/chat/completions")).to_be_visible()
    page.locator("summary", has_text="/v1/chat/completions").click()
    expect(page.locator("details[open] code", has_text="messages").first).to_be_visible()
    accessible(page)
    page.screenshot(path=folder / "docs.png")
    assert problems == [], problems


def main(url: str, keyed_url: str, folder: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for scheme in ("light", "dark"):
            chat(browser, url, folder, scheme)
        phone(browser, url, folder)
        keyed(browser, keyed_url, folder)
        described(browser, url, folder)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
