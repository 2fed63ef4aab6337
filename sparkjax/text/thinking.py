"""Whether and how hard a model thinks before it answers: what its chat template can be told.

Nothing is looked up by a model's name: the template is rendered on a probe, and what changes its
output is what it understands.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Protocol

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Of `reasoning_effort`, rising."""
_PROBE = [{"role": "user", "content": "x"}]
_SWITCHES = ("enable_thinking", "thinking")
# Which words a template may know, and the one for each effort from minimal to max.
_SCALES = (
    ("low", "low", "high", "high", "max", "max"),
    ("low", "low", "medium", "xhigh", "xhigh", "xhigh"),
    ("low", "low", "medium", "high", "high", "high"),
)
OPENING, CLOSING = "<think>", "</think>"


class Template(Protocol):
    """What is asked of a template."""

    source: str

    def render(self, messages: Any, **kwargs: Any) -> str:
        """See `sparkjax.text.template.ChatTemplate`."""
        ...


@dataclasses.dataclass(frozen=True)
class Thinking:
    """What a template understands.

    Attributes:
      tags: it writes reasoning in <think> tags.
      switch: the name that switches reasoning, or None: it cannot be switched.
      default: whether reasoning is on where nothing is said.
      efforts: what each effort is called in the template; empty where it knows none.
    """

    tags: bool = False
    switch: str | None = None
    default: bool = False
    efforts: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def available(self) -> bool:
        """Whether the model reasons at all, as far as its template tells."""
        return self.tags or bool(self.efforts)


def probe(template: Template) -> Thinking:
    """What a template understands, from how it renders one short conversation."""
    plain = _render(template)
    efforts: dict[str, Any] = dict(getattr(template, "efforts", {}))
    if "reasoning_effort" in template.source and not efforts:
        # One that prints any word was trained on OpenAI's three.
        echoes = "zzz" in (_render(template, reasoning_effort="zzz") or "")
        for scale in _SCALES[-1:] if echoes else _SCALES:
            words = list(dict.fromkeys(scale))
            seen = [_render(template, reasoning_effort=word) for word in words]
            if None not in seen and len(set(seen)) == len(words):
                efforts = dict(zip(EFFORTS[1:], scale, strict=True))
                break
    switch = None
    for name in _SWITCHES:
        on, off = _render(template, **{name: True}), _render(template, **{name: False})
        if on is not None and off is not None and on != off:
            switch = name
            break
    tags = OPENING in template.source or CLOSING in template.source
    off = _render(template, **{switch: False}) if switch else None
    return Thinking(tags, switch, tags and (switch is None or plain != off), efforts)


def start_of(prompt: str, tags: bool) -> Literal["content", "reasoning", "auto"]:
    """Where a rendered prompt leaves the model: "reasoning", "content" or "auto" (it decides).

    The end of the prompt tells: instructions and history have tags too.
    """
    tail = prompt[-64:].rstrip()
    if tail.endswith(OPENING):
        return "reasoning"
    if not tags or tail.endswith(CLOSING):
        return "content"
    return "auto"


def _render(template: Template, **kwargs: Any) -> str | None:
    try:
        return template.render(_PROBE, **kwargs)
    except ValueError:
        return None
