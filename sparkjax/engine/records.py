"""The journal's records: everything that the scheduler may depend on, as typed data.

Rank 0 writes one `Settings` record, then one `Tick` record a scheduler tick; every rank (rank 0
too) applies them in order. The scheduler is a pure function of these records and of the tokens
that the model returns, so a recorded run replays to the same decisions. The byte form is in
`sparkjax.engine.journal`.

Wall clock, free memory, set order and client connections never appear here: whatever depends on
them was decided before the record was written.
"""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all journal records: immutable, compared by value."""


class Sampling(Record, frozen=True):
    """How the tokens of one request are chosen. All values are already checked and resolved.

    Attributes:
      temperature: >= 0; 0 is greedy.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the smallest set of tokens whose probability reaches p, in (0, 1].
      min_p: drop tokens less likely than min_p times the most likely one, in [0, 1].
      presence_penalty, frequency_penalty: subtracted from the logits of tokens that were already
        generated (once; per occurrence), as OpenAI defines them.
      repetition_penalty: > 0; divides positive and multiplies negative logits of tokens of the
        prompt and the output (Keskar et al. 2019, CTRL).
      seed: unsigned 64-bit; with the position it is the whole state of the random generator.
      logit_bias: (token id, bias) pairs added to the raw logits.
      logprobs: None, or how many of the most likely tokens to report beside the chosen one (0-20).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None


class Grammar(Record, frozen=True):
    """What an answer has to follow.

    Attributes:
      source: Lark text, as `sparkjax.structured.sources` writes it.
      after: text of the answer after which the grammar begins (the closing tag of reasoning);
        "" begins at once. Until then only the tokens that end an answer are forbidden.
    """

    source: str
    after: str = ""


class Submit(Record, frozen=True):
    """One accepted request.

    Attributes:
      id: unique for the life of the engine, rising.
      tokens: the prompt, at least one token.
      max_tokens: how many tokens may be generated; 0 scores the prompt only.
      stop_ids: token ids that end the request (finish reason "stop"); the id itself is committed.
      prompt_logprobs: None, or how many alternatives to report for every prompt token (0-20).
      grammar: None, or what the answer has to follow. Each rank walks it along the committed
        tokens, so the masks themselves never travel.
    """

    id: int
    tokens: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None


class Tick(Record, frozen=True, tag="tick"):
    """What happens before tick `number` is scheduled.

    Attributes:
      submits: new requests, in order of arrival.
      cancels: ids whose client is gone (finish reason "cancelled").
      stops: ids in whose text a stop string was found (finish reason "stop").
      digest: rank 0's operation digest after the previous tick; a rank that holds another one
        stops before it applies this record.
    """

    number: int
    submits: tuple[Submit, ...] = ()
    cancels: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()
    digest: int = 0


class Applied(Record, frozen=True, tag="applied"):
    """A rank's own line in its crash log: what applying tick `number` made it do.

    Attributes:
      digest: this rank's operation digest after the tick.
      operations: the operations that the digest folds, in order, a line each.
    """

    number: int
    digest: int
    operations: tuple[str, ...] = ()


class Settings(Record, frozen=True, tag="settings"):
    """The first record of a journal: what all ranks must agree on.

    Attributes:
      version: the sparkjax version that wrote it.
      limits: the scheduler's limits.
      digests: name -> hex digest (config, model, weights, code), compared field by field.
    """

    version: str
    limits: Limits
    digests: dict[str, str] = {}


class Limits(Record, frozen=True):
    """The sizes that the scheduler decides by.

    Attributes:
      slots: how many sequences may hold caches at a time.
      pages: pages of the cache pool that may be given out (page ids 0 .. pages-1).
      page_size: tokens a page.
      context: the most tokens (prompt + output) of one sequence.
      queue: how many requests may wait; one more is refused at submission.
      tiles: prefill tile sizes in tokens, rising; the last is the canonical tile. A prompt is cut
        at multiples of the largest tile; its remainder runs in the smallest tile that holds it.
      rows: padded row counts of the decode step, rising; the last is at least `slots`.
      busy_tiles, idle_tiles: how many prefill tiles may run in one tick while some sequence
        decodes, and while none does.
      admission: "reserve" (pages for prompt and max_tokens are held from admission) or "grow"
        (pages for the prompt and `window` more tokens, extended while decoding).
      window: tokens that "grow" reserves ahead.
    """

    slots: int
    pages: int
    page_size: int
    context: int
    queue: int
    tiles: tuple[int, ...]
    rows: tuple[int, ...]
    busy_tiles: int = 1
    idle_tiles: int = 4
    admission: str = "reserve"
    window: int = 256


Entry = Settings | Tick | Applied
"""What a journal holds. `Applied` is in crash logs only: it never travels."""
