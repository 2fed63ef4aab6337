"""Regular expressions as clients write them."""

from __future__ import annotations

import re

import llguidance

MOST_REPEATS = 100_000
"""Times that a part of a text may have to come: counts inside each other multiply."""
_COUNT = re.compile(r"\{(\d*)(?:,(\d*))?\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]?", re.DOTALL)


def lark_pattern(pattern: str) -> str:
    """A regular expression that matches from end to end, as a terminal has it between slashes."""
    return str(llguidance.regex_to_lark(whole_pattern(pattern), ""))


def whole_pattern(pattern: str) -> str:
    """A regular expression without the anchors at its two ends."""
    if pattern.startswith("^"):
        pattern = pattern[1:]
    front = pattern[:-1]
    if pattern.endswith("$") and (len(front) - len(front.rstrip("\\"))) % 2 == 0:
        pattern = front
    return pattern


def searched_pattern(pattern: str) -> str:
    """A regular expression for a whole text, in which a schema's expression is found."""
    head = "" if pattern.startswith("^") else "(?s:.*)"
    tail = "" if pattern.endswith("$") and whole_pattern(pattern)[-1:] != "$" else "(?s:.*)"
    return f"{head}(?:{whole_pattern(pattern)}){tail}"


def wrong_pattern(pattern: str) -> str | None:
    """What is wrong with an expression whose parentheses do not match, or whose counted repeats
    multiply beyond MOST_REPEATS: an automaton may take such a one, but no answer to it ends."""
    try:
        re.compile(pattern)
    except re.error as error:  # or one of another dialect
        if "parenthesis" in error.msg:  # parts are put between parentheses of our own
            return f"is no regular expression: {error.msg}"
    except (OverflowError, RecursionError):
        pass  # counts are looked at below
    levels = [1]  # the most that something inside of each open group may come
    last, at = 1, 0
    while at < len(pattern):
        char = pattern[at]
        if char == "{" and (count := _COUNT.match(pattern, at)):
            digits = [d for d in count.groups() if d]
            if any(len(d) > 12 for d in digits):
                return f"repeats {max(digits, key=len)[:20]} times; allowed: {MOST_REPEATS}"
            last *= max([1, *map(int, digits)])
            if last > MOST_REPEATS:
                return f"repeats a part up to {last} times; allowed: {MOST_REPEATS}"
            levels[-1] = max(levels[-1], last)
            at = count.end()
            continue
        if char == "(":
            levels.append(1)
            last = 1
        elif char == ")" and len(levels) > 1:
            last = levels.pop()
            levels[-1] = max(levels[-1], last)
        elif char == "[" and (found := _CLASS.match(pattern, at)):
            last, at = 1, found.end()
            continue
        elif char not in "*+?":
            last = 1
            at += char == "\\"
        at += 1
    return None
