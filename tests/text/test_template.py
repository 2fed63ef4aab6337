"""Chat templates: equal to transformers, safe, and bounded."""

from __future__ import annotations

import json
import re
import time
from datetime import datetime

import pytest
from text_support import golden, small, smollm2, smollm2_tokenizer

from sparkjax.text.sandbox import Limits
from sparkjax.text.template import ChatTemplate, TemplateError, shield_messages
from sparkjax.weights.errors import CheckpointError

G = golden("templates.json")


@pytest.mark.parametrize(
    "case", G["cases"], ids=lambda c: f"{c['template']}-{c['chat']}-{len(c['text'])}"
)
def test_equals_transformers(case):
    template = ChatTemplate(G["templates"][case["template"]], G["tokens"])
    messages = G["conversations"][case["chat"]]
    assert template.render(messages, **case["options"]) == case["text"]


def test_the_template_of_a_gguf_file():
    template = ChatTemplate.from_gguf(smollm2().metadata)
    assert template.source == G["templates"]["smollm2"]
    case = next(c for c in G["cases"] if c["template"] == "smollm2" and c["chat"] == "turns")
    assert template.render(G["conversations"]["turns"]) == case["text"]
    assert ChatTemplate.from_gguf({}) is None


def test_templates_of_a_folder(tmp_path):
    assert ChatTemplate.from_dir(tmp_path) is None
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    message = [{"role": "user", "content": "x"}]

    def write(**more):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | more))

    write(chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    assert ChatTemplate.from_dir(tmp_path).render(message) == "<s>x</s>"
    write(
        chat_template=[
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "{{ tools | length }} tools"},
        ]
    )
    template = ChatTemplate.from_dir(tmp_path)
    assert template.render(message) == "plain"
    assert template.render(message, tools=[{}, {}]) == "2 tools"
    write(chat_template=[{"name": "rag", "template": ""}])
    with pytest.raises(CheckpointError, match="'default' is needed"):
        ChatTemplate.from_dir(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("file{{ eos_token }}")
    assert ChatTemplate.from_dir(tmp_path).render(message) == "file</s>"
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: line 1"):
        ChatTemplate.from_dir(tmp_path)


def test_a_template_refuses_messages():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateError, match="roles must alternate"):
        template.render([])
    with pytest.raises(TemplateError, match="TypeError"):
        ChatTemplate("{{ messages[0].content + 1 }}").render([{"content": "x"}])
    with pytest.raises(TemplateError, match="a message is a str"):
        template.render(["x"])


def test_tojson_and_dates():
    text = ChatTemplate("{{ messages[0] | tojson }}").render(
        [{"content": "<é>&'\"\n", "n": 10**12}]
    )
    assert text == '{"content": "<é>&\'\\"\\n", "n": 1000000000000}'
    now = ChatTemplate("{{ strftime_now('%Y') }}").render([])
    assert abs(int(now) - datetime.now().year) <= 1


def test_only_plain_values_reach_a_template():
    class Loud(str):
        def shout(self):
            return "reached"

    class Thing:
        secret = "reached"

    template = ChatTemplate(
        "{{ messages[0].content }}{{ messages[0].content.shout }}{{ messages[0].image.secret }}"
        "{{ messages[0].image }}"
    )
    assert template.render([{"content": Loud("x"), "image": Thing()}]) == "x<Thing>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ ''['__class__'] }}",
        "{{ ''|attr('__class__') }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ messages.append(1) }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ self.__init__ }}",
    ],
)
def test_the_sandbox_holds(source):
    try:
        text = ChatTemplate(source).render([{"role": "user"}])
    except TemplateError:
        return
    assert text == ""


BOMBS = {
    "repeat": "{{ 'a' * 100000000 }}",
    "repeat list": "{{ ([1] * 100000000) | length }}",
    "power": "{{ 9 ** 999999999 }}",
    "format": "{{ '%100000000d' % 1 }}",
    "format argument": "{{ '%*d' % (100000000, 1) }}",
    "format method": "{{ '{:>100000000}'.format(1) }}",
    "format method argument": "{{ '{:>{}}'.format(1, 100000000) }}",
    "format filter": "{{ '%100000000d' | format(1) }}",
    "center": "{{ 'a'.center(100000000) }}",
    "center filter": "{{ 'a' | center(100000000) }}",
    "center filter by name": "{{ 'a' | center(width=100000000) }}",
    "indent filter": "{{ 'a\nb' | indent(100000000) }}",
    "ljust": "{{ 'a'.ljust(100000000) }}",
    "zfill": "{{ 'a'.zfill(100000000) }}",
    "replace": "{% set x = 'a' * 100000 %}{{ x.replace('a', x) }}",
    "replace filter": "{% set x = 'a' * 100000 %}{{ x | replace('a', x) }}",
    "join": "{% set x = 'a' * 100000 %}{{ x.join(['b'] * 100000) }}",
    "join filter": "{% set x = 'a' * 100000 %}{{ (['b'] * 100000) | join(x) }}",
    "double": "{% set n = namespace(x='a') %}{% for i in range(99) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "double by macro": "{% macro f(x) %}{{ f(x ~ x) }}{% endmacro %}{{ f('a') }}",
    "output": "{% for i in range(99999) %}{% for j in range(99999) %}abcdefgh{% endfor %}{% endfor %}",
    "captured output": "{% set c = 'a' * 1000 %}{% set x %}{% for i in range(99999) %}{{ c }}"
    "{% endfor %}{% endset %}",
    "time": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_limits(name):
    start = time.perf_counter()
    # jinja evaluates constants when it compiles: the limits hold there too.
    template = ChatTemplate(BOMBS[name], limits=Limits(characters=1_000_000, seconds=0.5))
    with pytest.raises(TemplateError, match=r"characters|longer than|deeply"):
        template.render([])
    assert time.perf_counter() - start < 5


def test_long_messages_are_no_bombs():
    content = "{ 12345678901234567890 } % 99999999 : 88888888 " * 20_000
    message = {"role": "user", "content": content, "created": 1_700_000_000_000}
    template = ChatTemplate(
        "{% for m in messages %}{{ m.content | trim | replace('x', 'y') }}{{ m | tojson }}"
        "{{ m.content.split('%')[0].strip() }}{% if m.content.startswith('{') %}!{% endif %}"
        "{{ 'at %d: %s' % (m.created, m.role) }}{{ 'at {}'.format(m.created) }}{% endfor %}"
    )
    text = template.render([message])
    assert len(text) > 2 * len(content) - 100 and text.endswith("at 1700000000000")


def test_user_text_cannot_close_a_turn():
    t, template = smollm2_tokenizer(), ChatTemplate.from_gguf(smollm2().metadata)
    forged = G["conversations"]["forged"]
    honest = [{"role": "user", "content": forged[0]["content"].replace("|", "/")}]

    def control(messages):
        ids = t.encode_rendered(template.render(shield_messages(t, messages)))
        return [i for i in ids if i in t.vocabulary.control]

    assert control(forged) == control(honest)
    assert len(t.encode_rendered(template.render(forged))) > 0
    text = t.decode(t.encode_rendered(template.render(shield_messages(t, forged))))
    assert forged[0]["content"] in text


def test_shielding_keeps_the_reasoning_of_an_assistant():
    t = small("bytes")
    messages = [
        {"role": "assistant", "content": "<think>a</think>b<|end|>"},
        {"role": "user", "content": "<think>", "tools": ({"<|end|>": 1, "n": None},)},
    ]
    shielded = shield_messages(t, messages)
    assert "<think>a</think>b" in shielded[0]["content"]
    text = json.dumps([shielded[0]["content"][-8:], shielded[1]], ensure_ascii=False)
    assert not re.search(r"<think>|<\|end\|>", text)
    assert messages[0]["content"].endswith("<|end|>")
