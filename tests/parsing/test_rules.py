"""Cases of our own, by what the families' formats ask for: whole, and cut everywhere."""

from __future__ import annotations

import json

import pytest
from parsing_support import TOOLS, apart, cut, parse

from sparkjax.text.events import fold
from sparkjax.text.parsing import FORMATS, Setup, Tool

CALLED = "Sure.\n"
TRICKY = 'a </arg_value> "b" </tool_call> <think> {"x": [1}'
D = "｜DSML｜"
CH, MSG, END, START = "<|channel|>", "<|message|>", "<|end|>", "<|start|>assistant"


def xml(name: str, gap: str, **arguments: str) -> str:
    """A call as Qwen (gap: a newline) and MiMo write it."""
    pairs = "".join(f"<parameter={k}>{gap}{v}{gap}</parameter>{gap}" for k, v in arguments.items())
    return f"<tool_call>{gap}<function={name}>{gap}{pairs}</function>{gap}</tool_call>"


def dsml(name: str, space: str, *pairs: tuple[str, bool, str]) -> str:
    """A block of one call as DeepSeek writes it."""
    inside = "".join(
        f'<{D}{space}parameter name="{k}" string="{str(s).lower()}">{v}</{D}{space}parameter>\n'
        for k, s, v in pairs
    )
    block = " calls" if space else "tool_calls"
    return f'<{D}{block}>\n<{D}{space}invoke name="{name}">\n{inside}</{D}{space}invoke>\n</{D}{block}>'


CASES: list[tuple[str, str, str, str, str, list[tuple[str, dict]]]] = [
    # format, where the prompt ends, the answer, reasoning, content, calls
    ("glm", "reasoning", "One\ntwo\n</think>\nHi", "One\ntwo", "Hi", []),
    ("glm", "content", "<tool_call>set_flag<arg_key>name</arg_key><arg_value> x </arg_value><arg_key>value</arg_key>"
     "<arg_value>-2.5</arg_value></tool_call>", "", "", [("set_flag", {"name": " x ", "value": -2.5})]),
    ("glm", "content", "<tool_call>run_query<arg_key>options</arg_key><arg_value>{\"deep\": {\"a\": [null]}}</arg_value>"
     "</tool_call>then", "", "then", [("run_query", {"options": {"deep": {"a": [None]}}})]),
    ("glm", "content", "<tool_call>get_weather<arg_key>days</arg_key><arg_value>soon</arg_value></tool_call>",
     "", "", [("get_weather", {"days": "soon"})]),
    ("glm", "content", "a lone <tool_cal and </arg_key> stay", "", "a lone <tool_cal and </arg_key> stay", []),
    ("qwen", "reasoning", "Hm.\n</think>\n\n" + CALLED + "\n" + xml("write_file", "\n", path="a", content=" \n x\n"),
     "Hm.", CALLED.strip(), [("write_file", {"path": "a", "content": " \n x\n"})]),
    ("qwen", "content", xml("search_files", "\n", limit="null", hidden="True"), "", "",
     [("search_files", {"limit": None, "hidden": True})]),
    ("qwen", "reasoning", "No end", "No end", "", []),
    ("qwen", "content", xml("get_weather", "\n", city="null", days="3.0"), "", "",
     [("get_weather", {"city": "null", "days": 3})]),
    ("mimo", "content", xml("write_file", "", path="a", content="\nkept\n"), "", "",
     [("write_file", {"path": "a", "content": "\nkept\n"})]),
    ("mimo", "auto", "<think>Hm</think>" + xml("list_sessions", ""), "Hm", "", [("list_sessions", {})]),
    ("mimo", "auto", "No tag at all", "", "No tag at all", []),
    ("hermes", "reasoning", "Hm\n</think>\n\n<tool_call>\n" + json.dumps(
        {"arguments": {"path": "p", "content": TRICKY}, "name": "write_file"}) + "\n</tool_call>",
     "Hm", "", [("write_file", {"path": "p", "content": TRICKY})]),
    ("hermes", "content", '<tool_call>{"name": "list_sessions", "arguments": null}</tool_call>', "", "",
     [("list_sessions", {})]),
    ("hermes", "content", '<tool_call>{"name": 5}</tool_call>', "", '<tool_call>{"name": 5}</tool_call>', []),
    ("dsml", "reasoning", "Hm</think>A\n\n" + dsml("get_weather", "", ("city", True, ' "x" '), ("days", False, "2")),
     "Hm", "A", [("get_weather", {"city": ' "x" ', "days": 2})]),
    ("dsml", "content", dsml("run_query", "", ("sql", True, "1"), ("params", False, "[1, ")), "", "",
     [("run_query", {"sql": "1", "params": "[1, "})]),
    ("dsml", "content", "Half a <｜ stays", "", "Half a <｜ stays", []),
    ("dsml_spaced", "content", dsml("list_sessions", " "), "", "", [("list_sessions", {})]),
    ("llama", "content", '{"name": "get_weather", "parameters": {"city": "Ærø"}}; {"name": "list_sessions", "parameters": {}}',
     "", "", [("get_weather", {"city": "Ærø"}), ("list_sessions", {})]),
    ("llama", "content", '{"name": "nobody", "parameters": {}}', "", '{"name": "nobody", "parameters": {}}', []),
    ("llama", "content", '{"answer": 42}', "", '{"answer": 42}', []),
    ("pythonic", "content", "[get_weather(city='O\\'s ]), lo', days=-3), list_sessions()]", "", "",
     [("get_weather", {"city": "O's ]), lo", "days": -3}), ("list_sessions", {})]),
    ("pythonic", "content", "[run_query(params=[True, null, {'k': (1, 2)}], options={\"a\": false})]", "", "",
     [("run_query", {"params": [True, None, {"k": [1, 2]}], "options": {"a": False}})]),
    ("pythonic", "content", "[get_weather(city=f('x'))]", "", "[get_weather(city=f('x'))]", []),
    ("harmony", "content", f"{CH}analysis{MSG}Hm{END}{START}{CH}commentary{MSG}Looking.{END}"
     f"{START} to=functions.get_weather{CH}commentary <|constrain|>json{MSG}{{\"city\": \"Oslo\"}}<|call|>",
     "Hm", "Looking.", [("get_weather", {"city": "Oslo"})]),
    ("harmony", "content", f"{CH}final{MSG}Done<|return|>", "", "Done", []),
    ("plain", "reasoning", "Hm</think>\n\n<tool_call> is text here", "Hm", "<tool_call> is text here", []),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: f"{CASES[n][0]}-{n}")
def test_what_the_rules_ask_for(number: int):
    name, start, text, reasoning, content, calls = CASES[number]
    setup = Setup(tools=TOOLS, start=start)  # type: ignore[arg-type]
    for pieces in ([(None, text)], apart(name, text)):
        ways = [pieces, *(cut(pieces, [size]) for size in (1, 2, 3, 5, 8))]
        if len(pieces) == 1:
            ways += [[(None, text[:at]), (None, text[at:])] for at in range(1, len(text))]
        for way in ways:
            message = fold(parse(name, setup, way, "stop"))
            assert (message.reasoning.strip(), message.content.strip()) == (reasoning, content), way
            found = [(c.name, json.loads(c.arguments)) for c in message.tool_calls]
            assert found == calls and all(c.complete for c in message.tool_calls), way
            assert [list(arguments) for _, arguments in found] == [list(a) for _, a in calls]


def test_every_format_has_cases():
    assert {case[0] for case in CASES} == set(FORMATS)


@pytest.mark.parametrize("rest", ["b", " and so on", "\\n", "\\u0041", "\\ud83d\\ude00", '\\"', "\\udbff"])
def test_half_a_surrogate_pair_in_a_custom_input_takes_nothing_with_it(rest):
    """What a model escapes may be no character: U+FFFD, in text that any client can be sent."""
    text = f'<tool_call>{{"name": "shell", "arguments": {{"input": "a\\ud83d{rest}"}}}}</tool_call>'
    setup = Setup({"shell": Tool(kind="custom")})
    wanted = "a" + json.loads(f'"\\ud83d{rest}"')
    wanted = wanted.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    for pieces in (apart("hermes", text), cut(apart("hermes", text), list(range(len(text))))):
        (call,) = fold(parse("hermes", setup, pieces, "stop")).tool_calls
        assert call.arguments == wanted


def test_half_a_surrogate_pair_in_a_pythonic_call_stays_an_escape():
    text = "[f(a='x\\ud83d\\ude00', b=['\\udc00'])]"
    (call,) = fold(parse("pythonic", Setup({"f": Tool()}), apart("pythonic", text), "stop")).tool_calls
    assert call.arguments == '{"a": "x\\ud83d\\ude00", "b": ["\\udc00"]}'
