"""Log-probabilities in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparkjax.engine.plan import TokenLogprob
from sparkjax.text.tokenizer import Tokenizer

from .answer import Scored

LOWEST = -9999.0
"""What OpenAI writes for minus infinity, which JSON has no number for."""


def chat_form(tokenizer: Tokenizer, scored: Sequence[Scored]) -> dict[str, Any]:
    """The `logprobs` of a chat choice."""
    return {"content": [_entry(tokenizer, each.entry) for each in scored], "refusal": None}


def _entry(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, Any]:
    return {
        **_token(tokenizer, entry.token, entry.logprob),
        "top_logprobs": [_token(tokenizer, token, value) for token, value in entry.top],
    }


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    # A token that is no text has no bytes: those of a choice's tokens make its content.
    silent = tokenizer.is_special(token)
    return {
        "token": tokenizer.token_text(token),
        "logprob": _finite(logprob),
        "bytes": None if silent else list(tokenizer.token_bytes(token)),
    }


class CompletionForm:
    """The `logprobs` of a completion choice: four lists of the same length."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []
        self.text_offset: list[int] = []

    def add(self, token: int, entry: TokenLogprob | None, offset: int) -> None:
        """Appends a token; nothing predicts the first of a prompt, so it has no entry."""
        self.tokens.append(self._tokenizer.token_text(token))
        self.text_offset.append(offset)
        self.token_logprobs.append(None if entry is None else _finite(entry.logprob))
        self.top_logprobs.append(None if entry is None else self._top(entry))

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        found: dict[str, float] = {}
        seen = {token for token, _ in entry.top}
        chosen = () if entry.token in seen else ((entry.token, entry.logprob),)
        for token, value in (*entry.top, *chosen):
            name = self._tokenizer.token_text(token)
            # Two tokens can be spelled alike; a JSON object would keep only one of them.
            found[f"token_id:{token}" if name in found else name] = _finite(value)
        return found

    def json(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }


def prompt_form(
    tokenizer: Tokenizer, tokens: Sequence[int], entries: Sequence[TokenLogprob], count: int
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: of each prompt token its own entry and the `count` likeliest.

    Nothing predicts the first token. A rank is known of the likeliest only.
    """
    found: list[dict[str, Any] | None] = [None]
    for entry in entries:
        top = entry.top[:count]
        chosen = () if entry.token in dict(top) else ((entry.token, entry.logprob),)
        ranks = {token: rank for rank, (token, _) in enumerate(entry.top, 1)}
        found.append(
            {
                str(token): {
                    "logprob": _finite(value),
                    "rank": ranks.get(token),
                    "decoded_token": tokenizer.token_text(token),
                }
                for token, value in (*chosen, *top)
            }
        )
    return found[: len(tokens)]


def _finite(value: float) -> float:
    return value if value > LOWEST else LOWEST
