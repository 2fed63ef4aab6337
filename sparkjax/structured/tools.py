"""Tool calls that have to come, as a grammar: one rule set for each format of `text.parsing`.

Names and argument names are fixed text, arguments follow their JSON Schemas, descriptions play no
part. Where a format carries strings without quotes, a string argument is any text up to its
closing tag that has the length, pattern and format of its schema (or one of its enum's values);
alternatives of such strings are refused or told. The input of a custom tool follows its own grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from .call_writer import Writer
from .calls import MOST_CALLS, Calls, Offered
from .matcher import GrammarError
from .sources import literal

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
"""Names that a pythonic call can have."""


def grammar(calls: Calls) -> tuple[str, tuple[str, ...]]:
    """(Lark text of the grammar, the paths of what was left out).

    Raises:
      SchemaError: a tool's parameters; the path begins with the tool's name and "parameters".
      GrammarError: the format has no calls that can be forced.
    """
    if calls.format not in WRITERS:
        raise GrammarError(
            f"calls in the format {calls.format} cannot be forced; allowed: {', '.join(WRITERS)}"
        )
    writer = Writer(calls)
    return writer.finish(WRITERS[calls.format](writer))


def _beside(write: Callable[[Writer], str]) -> Callable[[Writer], str]:
    """A format whose calls stand beside text: the start of an answer."""

    def whole(w: Writer) -> str:
        start = write(w)
        if w.calls.answer is not None:
            return f"({start}) | {w.rule(w.json(w.calls.answer, w.calls.strict, 'answer'))}"
        if w.calls.free:
            return f"({start}){'*' if w.calls.parallel else '?'} {w.anything()}"
        return start

    return whole


def _object(w: Writer, tool: Offered, key: str) -> str:
    """{"name": N, KEY: {...}}"""
    head = json.dumps({"name": tool.name}, ensure_ascii=False)[:-1] + f', "{key}": '
    return f"{w.text(head)} {w.arguments(tool)} {literal('}')}"


def _hermes(w: Writer) -> str:
    call = w.one_of(lambda tool: _object(w, tool, "arguments"))
    newline = w.rule("/\\n?/")
    block = w.rule(f"{w.begin('<tool_call>')} {newline} {call} {newline} {w.text('</tool_call>')}")
    return w.several(block, newline)


def _llama(w: Writer) -> str:
    call = w.one_of(lambda tool: _object(w, tool, "parameters"))
    return w.several(call, literal("; "))


def _glm(w: Writer) -> str:
    closing = "</arg_value>"

    def call(tool: Offered) -> str:
        def opening(name: str, _: bool) -> str:
            return w.text(f"<arg_key>{name}</arg_key><arg_value>")

        pairs = w.pairs(tool, opening, closing, closing)
        return " ".join([w.text(tool.name), *pairs, w.text("</tool_call>")])

    return w.several(w.rule(f"{w.begin('<tool_call>')} {w.one_of(call)}"))


def _xml(gap: str) -> Callable[[Writer], str]:
    """Qwen's and MiMo's calls; `gap` stands between tags."""

    def write(w: Writer) -> str:
        def opening(name: str, _: bool) -> str:
            return w.text(f"<parameter={name}>{gap}")

        def call(tool: Offered) -> str:
            pairs = w.pairs(tool, opening, f"{gap}</parameter>{gap}", "</parameter>")
            head = w.text(f"{gap}<function={tool.name}>{gap}")
            return " ".join([head, *pairs, w.text(f"</function>{gap}</tool_call>")])

        block = w.rule(f"{w.begin('<tool_call>')} {w.one_of(call)}")
        return w.several(block, literal(gap) if gap else "")

    return write


def _dsml(space: str) -> Callable[[Writer], str]:
    """DeepSeek's calls; V4.1 writes a space behind its marker."""
    mark, end = f"<｜DSML｜{space}", f"</｜DSML｜{space}"
    block = "calls" if space else "tool_calls"

    def write(w: Writer) -> str:
        def opening(name: str, is_string: bool) -> str:
            return w.text(f'{mark}parameter name="{name}" string="{str(is_string).lower()}">')

        def call(tool: Offered) -> str:
            pairs = w.pairs(tool, opening, f"{end}parameter>\n", "</｜DSML｜")
            return " ".join(
                [w.text(f'{mark}invoke name="{tool.name}">\n'), *pairs, w.text(f"{end}invoke>\n")]
            )

        calls = w.one_of(call)
        if w.calls.parallel:
            calls = f"{calls} {calls}{{0,{MOST_CALLS - 1}}}"
        head = "" if w.calls.opened else w.begin(f"{mark}{block}>\n")
        return f"{head} {calls} {w.text(f'{end}{block}>')}".strip()

    return write


def _pythonic(w: Writer) -> str:
    def call(tool: Offered) -> str:
        if not _WORD.fullmatch(tool.name):
            raise GrammarError(
                f"the tool name {tool.name} cannot be written in the format pythonic"
            )
        return f"{literal(f'{tool.name}(')} {w.listed(tool, ', ')} {literal(')')}"

    return f"{literal('[')} {w.several(w.one_of(call), literal(', '))} {literal(']')}"


def _harmony(w: Writer) -> str:
    """An answer is messages, so the grammar is about all of it: reasoning, then the call, behind
    which the model stops. Where the server ends the reasoning, the answer goes on behind a
    `<|channel|>` of the server's."""

    def call(tool: Offered) -> str:
        head = f"commentary to=functions.{tool.name}"
        if tool.custom:
            return f"{w.text(f'{head}<|message|>')} {w.input(tool, '<|call|>', '<|call|>')}"
        end = f"({w.text('<|call|>')})?"
        return f"{w.text(f'{head} <|constrain|>json<|message|>')} {w.arguments(tool)} {end}"

    channel = '("analysis" | "commentary")' if w.calls.free else '"analysis"'
    said = w.until("<|end|>", "<|start|>assistant")
    message = w.rule(f"{w.text('<|channel|>')} {channel} {w.text('<|message|>')} {said}")
    head = w.rule(f"({message}* {w.text('<|channel|>')})?")
    last = [w.one_of(call)]
    end = f"({w.text('<|return|>')})?"
    if w.calls.answer is not None:
        answer = w.rule(w.json(w.calls.answer, w.calls.strict, "answer"))
        last.append(f"{w.text('final<|message|>')} {answer} {end}")
    elif w.calls.free:
        last.append(f'("final" | "commentary") {w.text("<|message|>")} {w.anything()} {end}')
    return f"{head} ({' | '.join(last)})"


WRITERS: dict[str, Callable[[Writer], str]] = {
    "hermes": _beside(_hermes),
    "llama": _beside(_llama),
    "glm": _beside(_glm),
    "qwen": _beside(_xml("\n")),
    "mimo": _beside(_xml("")),
    "dsml": _beside(_dsml("")),
    "dsml_spaced": _beside(_dsml(" ")),
    "pythonic": _beside(_pythonic),
    "harmony": _harmony,
}
"""The formats whose calls can be forced."""
FREE = frozenset(WRITERS) - {"llama", "pythonic"}
"""Those whose calls are told from the text around them."""
