"""Which format a model has is told by its template."""

from __future__ import annotations

import json

import pytest

from sparkjax.text.parsing import FORMATS, Tool, choose, format_named, sample
from sparkjax.text.parsing.values import property_types, typed, types_of
from sparkjax.text.template import ChatTemplate
from sparkjax.text.thinking import probe, start_of

CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}BODY{% endfor %}{% endfor %}"
XML = (
    "<tool_call>GAP<function={{ c.function.name }}>GAP{% for k, v in c.function.arguments | items %}"
    "<parameter={{ k }}>VALUE{{ v }}VALUE</parameter>GAP{% endfor %}</function>GAP</tool_call>"
)


def xml(gap: str, value: str) -> str:
    return CALLS.replace("BODY", XML.replace("GAP", gap).replace("VALUE", value))


@pytest.mark.parametrize(("source", "name"), [
    (xml("\n", "\n"), "qwen"),
    (xml("", ""), "mimo"),
    (xml("\n", ""), "mimo"),  # newlines between the tags, none inside a value
    ("<tool_call>{{ x }}<arg_key>", "glm"),
    ('{{ "<tool_call>\\n{\\"name\\": " }}', "hermes"),
    ("<tool_call>{\"name\": ", "hermes"),
    ('Respond in the format {"name": function name, "parameters": {}}', "llama"),
    ("<|python_tag|>", "llama"),
    ("[func_name1(params_name1=1)]", "pythonic"),
    ("<|python_start|>", "pythonic"),
    ("<|start|>assistant<|channel|>", "harmony"),
    ("{{ messages }}", "plain"),
])  # fmt: skip
def test_templates_tell_their_format(source, name):
    template = ChatTemplate(source)
    assert choose(template.source + sample(template.render)).name == name


def test_families_without_a_template():
    assert choose(None, "deepseek_v4").name == "dsml"
    assert choose(None, "deepseek_v41").name == "dsml_spaced"
    assert choose(None, "llama").name == "plain"
    with pytest.raises(ValueError, match="qwen"):
        format_named("nothing")
    assert format_named("glm") is FORMATS["glm"]


ON, OFF = "<think>\n", "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(("source", "switch", "default", "efforts"), [
    (f"{{{{ '{OFF}' if enable_thinking is defined and not enable_thinking else '{ON}' }}}}", "enable_thinking", True, 0),
    (f"{{{{ '{ON}' if enable_thinking else '{OFF}' }}}}", "enable_thinking", False, 0),
    (f"{{{{ '{ON}' if thinking else '</think>' }}}}", "thinking", False, 0),
    ("<think>", None, True, 0),
    ("<think>{{ {'low': 'L', 'high': 'H'}.get(reasoning_effort, 'M') }}", None, True, "max"),
    ("<think>{% if reasoning_effort is defined and reasoning_effort not in ['low', 'medium', 'xhigh'] %}"
     "{{ raise_exception('effort') }}{% endif %}{{ reasoning_effort }}", None, True, "xhigh"),
    ("Reasoning: {{ reasoning_effort }}", None, False, "high"),
    ("{{ messages[0].content }}", None, False, 0),
])  # fmt: skip
def test_what_templates_understand_of_reasoning(source, switch, default, efforts):
    thinking = probe(ChatTemplate(source))
    assert (thinking.switch, thinking.default) == (switch, default)
    assert thinking.efforts.get("max", 0) == efforts


@pytest.mark.parametrize(("prompt", "tags", "start"), [
    ("x<think>", True, "reasoning"), ("x<think>\n", True, "reasoning"), (f"x{OFF}", True, "content"),
    ("x</think>", True, "content"), ("<think>a</think>b\n", True, "auto"), ("x", False, "content"),
])  # fmt: skip
def test_the_end_of_a_prompt_tells_where_the_model_is(prompt, tags, start):
    assert start_of(prompt, tags) == start


DEFS = {"$defs": {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}}


@pytest.mark.parametrize(("schema", "types"), [
    ({"type": "string"}, {"string"}),
    ({"type": ["integer", "null"]}, {"integer", "null"}),
    ({"type": "number"}, {"number", "integer"}),
    ({"$ref": "#/$defs/n"}, {"integer"}),
    ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/n"}]}, {"string", "integer"}),
    ({"allOf": [{"type": ["string", "null"]}, {"type": "string"}]}, {"string"}),
    ({"enum": ["a", "b"]}, {"string"}),
    ({"enum": [1, None]}, {"integer", "number", "null"}),
    ({"const": True}, {"boolean"}),
    ({"properties": {}}, {"object"}),
    ({"items": {}}, {"array"}),
    ({"type": "string", "nullable": True}, {"string", "null"}),
    ({"$ref": "#/$defs/loop"}, None), ({"$ref": "http://x"}, None), ({}, None), (True, None),
    ({"type": 5}, None), ({"type": "tuple"}, None),
])  # fmt: skip
def test_types_of_schemas(schema, types):
    everything = types_of({}, {})
    assert types_of(schema, DEFS) == (everything if types is None else types)


@pytest.mark.parametrize(("text", "types", "value"), [
    ("5", {"integer"}, 5), ("5.0", {"integer"}, 5), ("5.5", {"integer"}, "5.5"), ("1e400", {"number"}, "1e400"),
    ("NaN", {"number"}, "NaN"), ("null", {"string"}, "null"), ("null", {"string", "null"}, None),
    ("5", {"string", "integer"}, 5), ("x", {"string", "integer"}, "x"), ("true", {"boolean"}, True),
    ("[1, {}]", {"array"}, [1, {}]), ("{}", {"array"}, "{}"), ("[" * 5000, {"array"}, "[" * 5000),
    (" 7 ", {"integer"}, 7), ("True", {"boolean"}, "True"),
])  # fmt: skip
def test_values_get_the_type_that_fits(text, types, value):
    assert json.loads(typed(text, frozenset(types))) == value


def test_python_words_count_where_a_format_writes_them():
    assert typed("None", frozenset(["null"]), True) == "null"
    assert typed("True", frozenset(["boolean"]), True) == "true"
    assert typed("None", frozenset(["string"]), True) == '"None"'


def test_undeclared_arguments_are_strings():
    assert property_types(Tool({"properties": {"a": {"type": "integer"}}}).parameters, "b") == {
        "string"
    }
    assert property_types({}, "a") == {"string"}


def test_schemas_that_multiply_are_read_in_few_steps():
    """Sixty references to two of the next one each: 2^60 paths."""
    defs = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
    assert types_of({"$ref": "#/$defs/d0"}, {"$defs": defs}) == types_of({}, {})
