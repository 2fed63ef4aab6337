"""A server with a scripted model: the real API, parsers and scheduler over answers that follow from
the prompt's words. Small real models cannot be relied on to call a tool."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable

from sparkjax.engine.records import Limits, Submit
from sparkjax.text.template import ChatTemplate
from tests.api import toy

LIMITS = Limits(
    slots=8, pages=20_000, page_size=64, context=262_144, queue=32, tiles=(64, 4096), rows=(2, 8)
)
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    'A call is <tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
HELLO = "Hello! 😀 How can I help you today?"
THOUGHT = "The user wants something."


def answer(prompt: str) -> str:
    """What the scripted model says."""
    last = prompt.rstrip().rsplit("<|im_start|>", 2)[-2]
    role, _, words = last.partition("\n")
    words = words.strip().removesuffix("<|im_end|>").strip()
    return _thought(prompt) + _reply(prompt, role, words)


def _thought(prompt: str) -> str:
    return "" if prompt.endswith("</think>\n\n") else f"{THOUGHT}\n</think>\n\n"


def _reply(prompt: str, role: str, words: str) -> str:
    if role == "tool":
        return f"The tool says: {words}"
    calls = re.findall(r"\bcall (\w+) with (\{.*?\})(?=$|\n| and call )", words)
    if calls:
        made = ({"name": name, "arguments": json.loads(values)} for name, values in calls)
        blocks = (f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in made)
        return "Let me look.\n\n" + "\n".join(blocks)
    if "repeat:" in words:
        return words.split("repeat:", 1)[1].strip()
    if "count" in words:
        return " ".join(map(str, range(1, 2000)))
    if "as JSON" in words:
        return '{"name": "Ada", "age": 36}'
    return HELLO


def script(submit: Submit) -> list[int]:
    """Token ids of the answer to a prompt."""
    tokenizer = toy.make_tokenizer()
    prompt = tokenizer.decode(submit.tokens, skip_special=False)
    return [*tokenizer.encode(answer(prompt)), toy.END]


def remembered(function: Callable[[Submit], list[int]]) -> Callable[[Submit], list[int]]:
    """The script, run once a request: the fake engine asks for every token anew."""
    known: dict[int, list[int]] = {}

    def once(submit: Submit) -> list[int]:
        if submit.id not in known:
            if len(known) > 64:
                known.clear()
            known[submit.id] = function(submit)
        return known[submit.id]

    return once


def make_served():
    """The scripted model, with tools and reasoning."""
    served = toy.make_served(context=LIMITS.context)
    return dataclasses.replace(served, template=ChatTemplate(TEMPLATE))


def options() -> dict:
    """What `tests.api.conftest.Api` takes."""
    return {
        "served": make_served(),
        "limits": LIMITS,
        "script": remembered(script),
        "max_body_bytes": 32 << 20,
    }
