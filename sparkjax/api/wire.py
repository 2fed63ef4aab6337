"""From pieces of answers to the JSON of OpenAI's responses and stream chunks. Pure functions.

Both endpoints have the same shape: `chunks` for a piece in a stream, `choice` for a whole answer.
A whole answer is the fold of its pieces, so the two cannot say different things.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from sparkjax.engine.plan import TokenLogprob
from sparkjax.text.detokenizer import Detokenizer
from sparkjax.text.events import (
    ContentDelta,
    Event,
    Fold,
    Message,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallStart,
)
from sparkjax.text.tokenizer import Tokenizer

from .answer import Piece, Scored
from .logprobs import CompletionForm, chat_form
from .prompts import Prompt


@dataclasses.dataclass
class Whole:
    """The fold of one answer's pieces."""

    folded: Fold = dataclasses.field(default_factory=Fold)
    scored: list[Scored] = dataclasses.field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None

    def add(self, piece: Piece) -> None:
        """Takes the next piece."""
        for event in piece.events:
            self.folded.add(event)
        self.scored += piece.scored
        self.prompt_logprobs += piece.prompt_logprobs
        self.finish = piece.finish

    @property
    def message(self) -> Message:
        """What the model said."""
        return self.folded.message()

    @property
    def text(self) -> str:
        """Its content."""
        return self.message.content


@dataclasses.dataclass(frozen=True)
class Usage:
    """Token counts of a request; several choices share their prompt. `reasoning` is None where
    answers are not told apart."""

    prompt: int
    completion: int
    cached: int
    reasoning: int | None = None

    def json(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        found: dict[str, Any] = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        if self.reasoning is not None:
            found["completion_tokens_details"] = {"reasoning_tokens": self.reasoning}
        return found


class Wire(Protocol):
    """How an endpoint writes its answers."""

    kind: str
    """`object` of a whole response."""
    chunk_kind: str
    """`object` of a chunk."""

    def chunks(self, index: int, piece: Piece) -> Iterable[dict[str, Any]]:
        """The choices of a piece's chunks, one each."""

    def choice(self, index: int, whole: Whole) -> dict[str, Any]:
        """The choice of a whole answer."""


class ChatWire:
    """Chat completions."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, logprobs: bool):
        self._tokenizer, self._logprobs = tokenizer, logprobs

    def chunks(self, index: int, piece: Piece) -> Iterable[dict[str, Any]]:
        """The role chunk comes with the first piece, so that the first event a client sees tells
        the time to the first token; the finish has an empty chunk of its own."""
        if piece.first:
            yield self._chunk(index, {"role": "assistant", "content": ""})
        scored = piece.scored
        for event in piece.events:
            if isinstance(event, ContentDelta):
                yield self._chunk(
                    index, {"content": event.text}, self._scored(scored) if scored else None
                )
                scored = ()
            elif (delta := chat_delta(event)) is not None:
                yield self._chunk(index, delta)
        if scored:
            yield self._chunk(index, {}, self._scored(scored))
        if piece.finish:
            yield self._chunk(index, {}, None, piece.finish)

    def choice(self, index: int, whole: Whole) -> dict[str, Any]:
        """See Wire."""
        return {
            "index": index,
            "message": chat_message(whole.message),
            "logprobs": self._scored(whole.scored) if self._logprobs else None,
            "finish_reason": whole.finish,
        }

    def _scored(self, scored: Iterable[Scored]) -> dict[str, Any]:
        return chat_form(self._tokenizer, tuple(scored))

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def chat_delta(event: Event) -> dict[str, Any] | None:
    """The `delta` of an event, None where it has none."""
    match event:
        case ContentDelta():
            return {"content": event.text}
        case ReasoningDelta():
            return {"reasoning_content": event.text}
        case ToolCallStart():
            call = _call(event.id, event.name, event.kind, "")
            return {"tool_calls": [{"index": event.index, **call}]}
        case ToolArgumentsDelta():
            body = (
                {"custom": {"input": event.text}}
                if event.kind == "custom"
                else {"function": {"arguments": event.text}}
            )
            return {"tool_calls": [{"index": event.index, **body}]}
    return None


def chat_message(message: Message) -> dict[str, Any]:
    """The message of a choice; `content` is null only beside calls."""
    made: dict[str, Any] = {
        "role": "assistant",
        "content": message.content if message.content or not message.tool_calls else None,
        "refusal": None,
    }
    if message.reasoning:
        made["reasoning_content"] = message.reasoning
    if message.tool_calls:
        made["tool_calls"] = [_call(c.id, c.name, c.kind, c.arguments) for c in message.tool_calls]
    return made


def _call(id: str, name: str, kind: str, text: str) -> dict[str, Any]:
    field = "input" if kind == "custom" else "arguments"
    return {"id": id, "type": kind, kind: {"name": name, field: text}}


class CompletionWire:
    """Text completions.

    Args:
      echoes: of each prompt, or empty without echo.
      n: choices of each prompt.
    """

    kind = chunk_kind = "text_completion"

    def __init__(
        self, tokenizer: Tokenizer, logprobs: bool, echoes: Sequence[Prompt] = (), n: int = 1
    ):
        self._tokenizer, self._logprobs, self._n = tokenizer, logprobs, n
        self._echoes = [_echoed(tokenizer, echo) for echo in echoes]

    def chunks(self, index: int, piece: Piece) -> Iterable[dict[str, Any]]:
        """The first chunk carries the echo, the last one only the finish."""
        prompt, offsets, tokens = self._echo(index)
        text = (prompt if piece.first else "") + piece.text
        form = CompletionForm(self._tokenizer)
        if piece.first:
            self._add_prompt(form, tokens, offsets, piece.prompt_logprobs)
        for each in piece.scored:
            form.add(each.entry.token, each.entry, len(prompt) + each.offset)
        if text or form.tokens:
            yield self._choice(index, text, form if form.tokens else None, None)
        if piece.finish:
            yield self._choice(index, "", None, piece.finish)

    def choice(self, index: int, whole: Whole) -> dict[str, Any]:
        """See Wire."""
        prompt, offsets, tokens = self._echo(index)
        form = CompletionForm(self._tokenizer)
        self._add_prompt(form, tokens, offsets, whole.prompt_logprobs)
        for each in whole.scored:
            form.add(each.entry.token, each.entry, len(prompt) + each.offset)
        return self._choice(index, prompt + whole.text, form, whole.finish)

    def _choice(
        self, index: int, text: str, form: CompletionForm | None, finish: str | None
    ) -> dict[str, Any]:
        logprobs = form.json() if form is not None and self._logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _echo(self, index: int) -> tuple[str, list[int], tuple[int, ...]]:
        return self._echoes[index // self._n] if self._echoes else ("", [], ())

    def _add_prompt(
        self,
        form: CompletionForm,
        tokens: tuple[int, ...],
        offsets: list[int],
        entries: tuple[TokenLogprob, ...],
    ) -> None:
        if self._logprobs and tokens:
            for token, offset, entry in zip(tokens, offsets, (None, *entries), strict=True):
                form.add(token, entry, offset)


def _echoed(tokenizer: Tokenizer, echo: Prompt) -> tuple[str, list[int], tuple[int, ...]]:
    """(text, character offset of each token, tokens) of an echoed prompt."""
    detokenizer = Detokenizer(tokenizer, skip_special=False)
    text, offsets = "", []
    for i, token in enumerate(echo.tokens):
        offsets.append(len(text))
        if i >= echo.added:
            text += detokenizer.push((token,))
    if echo.given is None:
        return text, offsets, echo.tokens
    # Decoding may differ from what was given (normalization): the client gets its own words back.
    given = echo.given.encode("utf-8", "replace").decode()
    return given, [min(offset, len(given)) for offset in offsets], echo.tokens
