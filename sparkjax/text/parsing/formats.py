"""The formats of answers, declared once: which parser reads them, and how a template tells."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from .dsml import Dsml
from .glm import Glm
from .harmony import Harmony
from .hermes import Hermes
from .llama import Llama
from .machine import Machine, Setup
from .pythonic import Pythonic
from .qwen import Mimo, Qwen
from .tagged import THINK, UNTHINK, Tagged


class Plain(Tagged):
    """Text without calls; reasoning between <think> and </think> where the prompt opens it."""

    control = (THINK, UNTHINK)


@dataclasses.dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
      name: as the setting `model.answer_format` has it.
      parser: reads it.
      told_by: whether a chat template writes it.
      model_types: of config.json: families without a template.
      calls: it has tool calls.
      close: what ends reasoning that has to end here.
      close_to_call: the same where a grammar about calls goes on behind it; "" is `close`.
      splits: how reasoning is set apart: "tags" (<think>), "channels" (by the format itself),
        or "" (not at all).
    """

    name: str
    parser: type[Machine]
    told_by: Callable[[str], bool] = lambda template: False
    model_types: tuple[str, ...] = ()
    calls: bool = True
    splits: str = "tags"
    close: str = UNTHINK
    close_to_call: str = ""

    def make(self, setup: Setup) -> Machine:
        """A parser of one answer."""
        return self.parser(setup)


_LINES = "\n</think>\n\n"
_NEXT = "<|end|><|start|>assistant<|channel|>"
_FINAL = f"{_NEXT}final<|message|>"
# How calls of the probe are written (see `sample`): values on lines of their own, or not.
_TIGHT = re.compile(r"<parameter=city>Oslo</parameter>")


def _xml(template: str) -> bool:
    return "<function=" in template and "<parameter=" in template


FORMATS: dict[str, Format] = {
    each.name: each
    for each in (
        Format("glm", Glm, lambda t: "<arg_key>" in t),
        Format("mimo", Mimo, lambda t: _xml(t) and bool(_TIGHT.search(t))),
        Format("qwen", Qwen, _xml, close=_LINES),
        Format(
            "harmony",
            Harmony,
            lambda t: "<|channel|>" in t,
            splits="channels",
            close=_FINAL,
            close_to_call=_NEXT,
        ),
        Format(
            "hermes",
            Hermes,
            lambda t: "<tool_call>" in t and '"name":' in t.replace(r"\"", '"'),
            close=_LINES,
        ),
        Format(
            "pythonic",
            Pythonic,
            lambda t: "<|python_start|>" in t or "[func_name1(" in t,
            splits="",
        ),
        Format(
            "llama",
            Llama,
            lambda t: "<|python_tag|>" in t or '"parameters":' in t.replace(r"\"", '"'),
            splits="",
        ),
        Format("dsml", Dsml, lambda t: "｜DSML｜" in t, ("deepseek_v4",)),
        Format("dsml_spaced", Dsml, lambda t: False, ("deepseek_v41",)),
        Format("plain", Plain, lambda t: True, calls=False, close=_LINES),
    )
}
"""By name; the first one that a template tells of is chosen."""


def sample(render: Callable[..., str]) -> str:
    """How a template writes a call, "" if it refuses.

    Args:
      render: of `sparkjax.text.template.ChatTemplate`.
    """
    function = {"name": "get_weather", "arguments": {"city": "Oslo"}}
    messages = [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        },
    ]
    try:
        return render(messages, add_generation_prompt=False)
    except ValueError:
        return ""


def choose(template: str | None, model_type: str = "") -> Format:
    """The format of a model's answers.

    Args:
      template: source of its chat template and, if it has one, a `sample` of what it writes; None
        where there is no template.
      model_type: of its config.json.
    """
    for each in FORMATS.values():
        if template is None and model_type in each.model_types:
            return each
        if template is not None and each.told_by(template):
            return each
    return FORMATS["plain"]


def format_named(name: str) -> Format:
    """The format of a name.

    Raises:
      ValueError: there is none.
    """
    if name not in FORMATS:
        raise ValueError(f"answer format {name!r} is not known; allowed: {', '.join(FORMATS)}")
    return FORMATS[name]
