"""A toy model that reasons and calls tools: a tokenizer with the tags, and templates of each kind."""

from __future__ import annotations

from typing import Any

from sparkjax.api.served import SamplingDefaults, ServedModel
from sparkjax.text.template import ChatTemplate
from sparkjax.text.tokenizer import Tokenizer
from sparkjax.text.vocabulary import Vocabulary

from . import toy
from .fake_engine import Script

TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>",
        "<arg_value>", "</arg_value>", "｜DSML｜", "<|python_tag|>", "<|channel|>", "<|message|>",
        "<|end|>", "<|start|>", "<|call|>", "<|return|>", "<|constrain|>"]  # fmt: skip
TOKENS = [*toy.TOKENS, *TAGS]
CONTROL = frozenset(range(len(toy.TOKENS), len(TOKENS)))


def make_tokenizer() -> Tokenizer:
    vocabulary = Vocabulary(
        tuple(TOKENS), byte_level=True, literal=toy.SPECIAL | CONTROL, special=toy.SPECIAL,
        control=toy.SPECIAL | CONTROL,
    )  # fmt: skip
    return Tokenizer(vocabulary, toy.Longest(), bos_id=toy.BOS, eos_ids=[toy.END], add_bos=False)


HEAD = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
)
TOOLS = "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{{ 'CALLS' }}{% endif %}"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n"
SWITCH = "{{ '<think>\\n' if enable_thinking is not defined or enable_thinking else '<think>\\n\\n</think>\\n\\n' }}"
HERMES = (
    TOOLS.replace("CALLS", '<tool_call>{"name": N, "arguments": A}</tool_call>')
    + HEAD
    + ASK
    + SWITCH
    + "{% endif %}"
)
GLM = TOOLS.replace("CALLS", "<tool_call>N<arg_key>K</arg_key>") + HEAD + ASK + "<think>{% endif %}"
QWEN = (
    TOOLS.replace("CALLS", "<function=N>\\n<parameter=K>\\nV") + HEAD + ASK + SWITCH + "{% endif %}"
)
MIMO = (
    TOOLS.replace("CALLS", "<function=N><parameter=K>V</parameter>")
    + HEAD
    + ASK
    + (
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
    )
)
LLAMA = (
    TOOLS.replace("CALLS", '<|python_tag|>{"name": N, "parameters": A}')
    + HEAD
    + ASK
    + "{% endif %}"
)
HARMONY = (
    "{% if reasoning_effort is defined %}Reasoning: {{ reasoning_effort }}{% endif %}"
    + TOOLS.replace("CALLS", "<|channel|>commentary")
    + HEAD
    + "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
TEMPLATES = {
    "hermes": HERMES,
    "glm": GLM,
    "qwen": QWEN,
    "mimo": MIMO,
    "llama": LLAMA,
    "harmony": HARMONY,
}


def make_served(source: str = HERMES, **more: Any) -> ServedModel:
    """A model with this chat template."""
    return ServedModel(
        id="toy", tokenizer=make_tokenizer(), template=ChatTemplate(source), context=4096,
        vocab_size=len(TOKENS), stop_ids=(toy.END,),
        **{"defaults": SamplingDefaults(temperature=0.7, top_p=0.9)} | more,
    )  # fmt: skip


def speak(text: str, *, end: bool = True) -> Script:
    """Every request gets this text; tags in it are control tokens."""
    ids = make_tokenizer().encode_rendered(text) + ([toy.END] if end else [])
    return lambda submit: ids


def function(name: str = "get_weather", **properties: Any) -> dict[str, Any]:
    """A tool."""
    parameters = {"type": "object", "properties": properties or {"city": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}
