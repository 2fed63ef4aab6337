"""A loaded model as a library object: forward passes, scoring, generation, gradients."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from .kernels import native
from .mesh import spmd
from .mesh.context import Context
from .models import cache as caches
from .models import params as declarations
from .models import tables
from .models.batch import Batch
from .models.registry import family_of
from .weights import digest, load
from .weights.checkpoint import GGUF, Checkpoint, open_checkpoint, tensors_of
from .weights.errors import CheckpointError

log = logging.getLogger(__name__)


class Forward(NamedTuple):
    """Teacher-forced outputs of one sequence of T tokens.

    Attributes:
      logits: float32 [T, vocab].
      final: [T, H], what the vocabulary projection reads.
      residual: [T, ...], the raw residual after the last layer.
      captured: activations by name: "embed" [T, H], the others [layers, T, ...].
    """

    logits: np.ndarray
    final: np.ndarray
    residual: np.ndarray
    captured: dict[str, np.ndarray]


@dataclasses.dataclass
class Model:
    """A family, its configuration, its (sharded) parameters, and how to run them."""

    family: Any
    config: Any
    params: Any
    context: Context
    mesh: Mesh | None = None
    checkpoint: Checkpoint | None = None
    tables: tables.Tables = dataclasses.field(default_factory=dict)
    """What the family looks up on the host (see `models.tables`)."""
    digests: dict[int, digest.Digests] | None = None
    """By rank of this process: what was read of each parameter (see `weights.digest`)."""

    @classmethod
    def load(
        cls,
        path: str | Path,
        dtype: str | None = None,
        ranks: int = 1,
        context: Context | None = None,
        progress: load.Progress | None = None,
        before: Callable[[Any, Any, dict[int, dict[str, int]]], Any] = lambda *facts: None,
        check: bool = False,
        **options: Any,
    ) -> Model:
        """Loads a checkpoint directory or a .gguf file.

        Args:
          dtype: compute dtype, "float32" or "bfloat16" (default: float32 on a CPU, else bfloat16).
          ranks: devices to spread the weights over (tensor parallelism).
          context: overrides dtype and ranks.
          progress: called with (bytes done, bytes in all).
          check: take digests of what is read, and compare what the devices hold with them.
          before: called before anything is allocated, with the family, its configuration, and for
            each rank of this process the bytes of its weights by format; may raise.
          **options: of `weights.load.load_params`: reading, images, twelve_bits.

        Raises:
          CheckpointError, UnsupportedConfig: the file cannot be read or is not supported; or, with
            `check`, a device holds something else.
        """
        if context is None:
            context = here(dtype, ranks)
        checkpoint = open_checkpoint(path)
        family = family_of(checkpoint.config)
        config = family.read_config(checkpoint.config)
        mesh = spmd.make_mesh(context.ranks) if context.ranks > 1 and not context.own else None
        hosted = tables.declared(family, config)
        tree_loaded, unread = loaded_tree(family, config, context.ranks, checkpoint)
        notes = digest.Notes() if check else None
        params = load.load_params(
            tree_loaded,
            checkpoint,
            ranks=context.ranks,
            rank=context.transport.rank if context.transport is not None else None,
            mesh=mesh,
            expand=load.expand_where_needed(context.platform),
            ignored=unread,
            progress=progress,
            before=lambda weights: before(family, config, weights),
            notes=notes,
            facts={"platform": context.platform, "native": native.available()},
            **options,
        )
        model = cls(family, config, params, context, mesh, checkpoint)
        if notes is not None:
            held = model._held()
            model.digests = notes.digests(held)
            digest.require(model._differences(held), str(path))
        model.tables = tables.open_tables(hosted, checkpoint, lambda: model.tokenizer)
        return model

    def weight_problems(self) -> list[str]:
        """Where the devices do not hold what was read, in words naming rank and parameter; []
        where they do. Reads every weight once.

        Raises:
          ValueError: the model was loaded without `check`.
        """
        if self.digests is None:
            raise ValueError("no digests were taken: load the model with check=True")
        return self._differences(self._held())

    def _differences(self, held: dict[int, digest.Digests]) -> list[str]:
        read = self.digests or {}
        return [line for r, d in held.items() for line in digest.differences(read[r], d, r)]

    def _held(self) -> dict[int, digest.Digests]:
        """The digests of what this process's devices hold, by rank."""
        held = digest.of_device(self.params)
        if self.context.transport is not None:
            return {self.context.transport.rank: held[0]}
        return held

    @classmethod
    def random(cls, config_values: dict[str, Any], context: Context, seed: int = 0) -> Model:
        """A model with random weights of a config.json's shapes."""
        family = family_of(config_values)
        config = family.read_config(config_values)
        tree = family.declare(config, context.ranks)
        params = declarations.initialise(tree, jax.random.key(seed), context.dtype)
        hosted = tables.random_tables(tables.declared(family, config), seed)
        return cls(family, config, params, context, tables=hosted)

    def declared(self, ranks: int) -> declarations.Tree:
        """The declarations of all parameters that are loaded, over so many ranks."""
        tree = self.family.declare(self.config, ranks)
        if "draft" in self.params:
            tree["draft"] = self.family.declare_draft(self.config, ranks)
        return tree

    def prelude(
        self, rows: Sequence[tuple[np.ndarray, int, int]], width: int
    ) -> dict[str, np.ndarray] | None:
        """What the host looks up for a batch; arguments as in `models.tables.gather`."""
        return tables.gather(self.family, self.config, self.tables, rows, width)

    def _row(self, tokens: np.ndarray, start: int, count: int, pages: int, pad: int) -> Batch:
        """Tokens start .. start + count - 1 of one sequence as a batch in slot 0."""
        batch = one_row(tokens[start : start + count], start, pages, pad)
        return dataclasses.replace(batch, prelude=self.prelude([(tokens, start, count)], pad))

    @functools.cached_property
    def page(self) -> int:
        """Tokens a page (see `caches.page_size`)."""
        return caches.page_size(self.family.declare_caches(self.config, self.context.ranks))

    # --- Programs -----------------------------------------------------------------------------

    def new_caches(self, sizes: caches.Sizes, context: Context | None = None) -> caches.Caches:
        """Empty caches of these sizes, on the model's devices."""
        context = context or self.context
        declared = self.family.declare_caches(self.config, context.ranks)
        specs = caches.specs(declared, context.ranks)
        shapes = spmd.local(caches.shapes(declared, sizes, context.dtype), specs, context)
        places = spmd.shardings(self.mesh, specs)
        return jax.jit(
            lambda: {name: jnp.zeros(s.shape, s.dtype) for name, s in shapes.items()},
            out_shardings=places,
        )()

    def spread(self, function: Any, context: Context, out_specs: Any) -> Any:
        """`function(params, cache, *replicated)` on every rank over its own shares."""
        if self.mesh is None:
            return function
        declared = self.family.declare_caches(self.config, context.ranks)
        weights = declarations.specs(self.declared(context.ranks), context.ranks)
        cache = caches.specs(declared, context.ranks)

        def call(params: Any, kv: Any, *rest: Any) -> Any:
            specs = (weights, cache, *(PartitionSpec() for _ in rest))
            return spmd.spmd(function, self.mesh, specs, out_specs(cache))(params, kv, *rest)

        return call

    @functools.cached_property
    def _tile(self) -> Any:
        """jit of one tile: logits, final hidden, residual and captures of every position."""

        def run(params: Any, cache: Any, batch: Batch, context: Context, capture: tuple) -> Any:
            def inside(params: Any, cache: Any, batch: Batch) -> Any:
                out = self.family.forward(
                    params, cache, batch, self.config, context, capture=capture
                )
                logits = self.family.logits(params, out.residual, self.config, context)
                final = self.family.final(params, out.residual, self.config, context)
                return (logits, final, out.residual, out.captured), out.cache

            call = self.spread(inside, context, lambda cache: (PartitionSpec(), cache))
            return call(params, cache, batch)

        return jax.jit(run, static_argnums=(3, 4), donate_argnums=1)

    def logits_of(self, params: Any, residual: jax.Array) -> jax.Array:
        """float32 [rows, vocab] of residual rows [rows, ...], inside a jitted program."""

        def inside(params: Any, residual: jax.Array) -> jax.Array:
            return self.family.logits(params, residual, self.config, self.context)

        if self.mesh is None:
            return inside(params, residual)
        specs = declarations.specs(self.declared(self.context.ranks), self.context.ranks)
        return spmd.spmd(inside, self.mesh, (specs, PartitionSpec()), PartitionSpec())(params, residual)

    # --- Research -----------------------------------------------------------------------------

    def forward(
        self,
        tokens: Any,
        capture: Collection[str] = (),
        tile: int | None = None,
        room: int = 0,
    ) -> Forward:
        """Teacher-forced outputs of one sequence.

        Args:
          tokens: int [T].
          capture: names of activations to return (`models.family.CAPTURES`, and the family's own).
          tile: tokens a program call (default: all at once); the results do not depend on it
            beyond rounding.
          room: tokens that the caches are made for, where more than these (calls of equal room
            and tile share a program).
        """
        tokens = np.asarray(tokens, np.int32)
        tile = tile or len(tokens)
        pages = pages_for(max(len(tokens), room), self.page)
        cache = self.new_caches(caches.Sizes(pages, self.page, slots=1))
        parts = []
        for start in range(0, len(tokens), tile):
            piece = tokens[start : start + tile]
            batch = self._row(tokens, start, len(piece), pages, pad=tile)
            out, cache = self._tile(self.params, cache, batch, self.context, tuple(capture))
            logits, final, residual, captured = jax.tree.map(np.asarray, out)
            n = len(piece)
            parts.append(
                (
                    logits[0, :n],
                    final[0, :n],
                    residual[0, :n],
                    {k: v[0, :n] if k == "embed" else v[:, 0, :n] for k, v in captured.items()},
                )
            )
        captured = {
            name: np.concatenate([p[3][name] for p in parts], axis=0 if name == "embed" else 1)
            for name in parts[0][3]
        }
        logits, final, residual = (np.concatenate([p[i] for p in parts]) for i in range(3))
        return Forward(logits, final, residual, captured)

    def score(self, text: str | Any, tile: int = 128) -> np.ndarray:
        """Teacher-forced log-probabilities: entry i is log p(token i + 1 | tokens 0 .. i).

        Logits are computed a few positions at a time: never a [T, vocab] array.

        Args:
          text: a string (encoded as a document), or token ids int [T], T >= 2.
          tile: tokens a program call.

        Returns:
          float32 [T - 1], natural logarithms.
        """
        tokens = self.encode(text) if isinstance(text, str) else text
        tokens = np.asarray(tokens, np.int32)
        if len(tokens) < 2:
            raise ValueError(f"scoring needs at least 2 tokens, got {len(tokens)}")
        pages = pages_for(len(tokens), self.page)
        cache = self.new_caches(caches.Sizes(pages, self.page, slots=1))
        found = []
        for start in range(0, len(tokens), tile):
            piece = tokens[start : start + tile]
            targets = np.zeros(tile, np.int32)
            following = tokens[start + 1 : start + tile + 1]
            targets[: len(following)] = following
            batch = self._row(tokens, start, len(piece), pages, pad=tile)
            scores, cache = self._scored(self.params, cache, batch, targets)
            found.append(np.asarray(scores)[: len(following)])
        return np.concatenate(found)

    @functools.cached_property
    def _scored(self) -> Any:
        """jit of one tile that returns float32 [Q], the log-probabilities of the targets."""
        from .engine.sampler import prompt_logprobs

        def run(params: Any, cache: Any, batch: Batch, targets: jax.Array) -> Any:
            def inside(params: Any, cache: Any, batch: Batch) -> Any:
                out = self.family.forward(params, cache, batch, self.config, self.context)
                return out.residual, out.cache

            call = self.spread(inside, self.context, lambda cache: (PartitionSpec(), cache))
            residual, cache = call(params, cache, batch)
            scored = prompt_logprobs(lambda rows: self.logits_of(params, rows), residual[0], targets)
            return scored.logprob, cache

        return jax.jit(run, donate_argnums=1)

    def embed(
        self, text: str | Any, pooling: Any = "mean", normalize: bool = True, tile: int = 128
    ) -> np.ndarray:
        """A text as one vector: the final hidden states, pooled (see `pooling.Pooler.embed`).

        Args:
          text: a string (encoded as a document), or token ids int [T], T >= 1.
          pooling: "mean" or "last".
          normalize: to length 1.
          tile: tokens a program call.

        Returns:
          float32 [H].
        """
        from .pooling import Pooler

        tokens = self.encode(text) if isinstance(text, str) else text
        key = pages_for(len(tokens), self.page), tile
        if key not in self._poolers:
            self._poolers[key] = Pooler(self, key[0] * self.page, tile)
        return self._poolers[key].embed(tokens, pooling, normalize)

    @functools.cached_property
    def _poolers(self) -> dict[tuple[int, int], Any]:
        return {}

    # --- Text ---------------------------------------------------------------------------------

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer.

        Raises:
          CheckpointError: it has none.
        """
        if self.checkpoint is None:
            raise CheckpointError("a model with random weights has no tokenizer")
        from .text.tokenizer import Tokenizer

        if isinstance(self.checkpoint, GGUF):
            return Tokenizer.from_gguf(self.checkpoint.file.metadata, str(self.checkpoint.path))
        return Tokenizer.from_dir(self.checkpoint.path)

    def encode(self, text: str) -> list[int]:
        """A document's token ids, with the begin token where the checkpoint wants one. Control
        tokens spelled in the text are ordinary text."""
        ids = self.tokenizer.encode(text)
        return [self.tokenizer.bos_id, *ids] if self.tokenizer.add_bos else ids

    @functools.cached_property
    def has_tokenizer(self) -> bool:
        """Whether the checkpoint carries a tokenizer."""
        try:
            return self.tokenizer is not None
        except CheckpointError:
            return False

    def generate(
        self,
        prompts: str | Sequence[Any],
        max_tokens: int = 256,
        stop_ids: tuple[int, ...] | None = None,
        **sampling: Any,
    ) -> Any:
        """Generates from one prompt or several (text, or token ids).

        Args:
          max_tokens: at most so many new tokens each.
          stop_ids: ids that end an answer (default: the model's own end ids).
          **sampling: fields of `engine.records.Sampling`; without any, greedy.

        Returns:
          A `generate.Generation`, or a list of them for a list of prompts.
        """
        one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (int, np.integer)))
        batch = [prompts] if one else list(prompts)
        from .engine.records import Sampling

        found = self._generator.generate(batch, max_tokens, Sampling(**sampling), stop_ids)
        return found[0] if one else found

    @functools.cached_property
    def _generator(self) -> Any:
        from .generate import Generator

        return Generator(self)

    def greedy(
        self, tokens: Any, count: int, tile: int | None = None, room: int = 0
    ) -> np.ndarray:
        """The `count` most likely next tokens, one at a time (stop ids do not stop it); tile and
        room as in `forward`."""
        tokens = np.asarray(tokens, np.int32)
        tile = tile or len(tokens)
        pages = pages_for(max(len(tokens) + count, room), self.page)
        cache = self.new_caches(caches.Sizes(pages, self.page, slots=1))
        out: Any = None
        for start in range(0, len(tokens), tile):
            piece = tokens[start : start + tile]
            batch = self._row(tokens, start, len(piece), pages, pad=tile)
            out, cache = self._tile(self.params, cache, batch, self.context, ())
            last = len(piece) - 1
        found = [int(np.argmax(np.asarray(out[0])[0, last]))]
        while len(found) < count:
            so_far = np.concatenate([tokens, np.array(found, np.int32)])
            batch = self._row(so_far, len(so_far) - 1, 1, pages, pad=1)
            out, cache = self._tile(self.params, cache, batch, self.context, ())
            found.append(int(np.argmax(np.asarray(out[0])[0, 0])))
        return np.array(found, np.int32)


def ignored(family: Any, config: Any) -> tuple[str, ...]:
    """Prefixes of the tensors that a family never reads (its IGNORED, and ignored(config))."""
    more = family.ignored(config) if hasattr(family, "ignored") else ()
    return (*getattr(family, "IGNORED", ()), *more)


def loaded_tree(
    family: Any, config: Any, ranks: int, checkpoint: Checkpoint
) -> tuple[declarations.Tree, tuple[str, ...]]:
    """(the declarations of all that is loaded; the tensors, and prefixes of such, that are not: what
    the family never reads, layers that are there in part, tables that stay in the file)."""
    tree = family.declare(config, ranks)
    drafts, partial = _drafts(family, config, ranks, checkpoint)
    hosted = tables.tensors(tables.declared(family, config), checkpoint)
    unread = (*ignored(family, config), *partial, *hosted)
    return (tree | {"draft": drafts} if drafts else tree), unread


def _drafts(
    family: Any, config: Any, ranks: int, checkpoint: Checkpoint
) -> tuple[declarations.Tree, tuple[str, ...]]:
    """A family's own prediction layers where the file holds them whole, else nothing; and the
    tensors of layers that it holds in part, which are not read."""
    tree: declarations.Tree = getattr(family, "declare_draft", lambda config, ranks: {})(config, ranks)
    found: set[str] = set()
    missing: list[str] = []
    for _, param in declarations.leaves(tree):
        options = [o if isinstance(o, str) else o.name for o in (param.name, *param.also)]
        for _, fill in param.places():
            names = {n for o in options for n in tensors_of(checkpoint, o.format(**fill))}
            found |= names
            if not names and not param.optional:
                missing.append(param.name.format(**fill))
    if not missing:
        return tree, ()
    if found:
        log.info(
            "%s: prediction layers are not loaded: %d tensors are missing, the first is %s",
            checkpoint.path, len(missing), missing[0],
        )  # fmt: skip
    return {}, tuple(sorted(found))


def pages_for(tokens: int, page: int = caches.PAGE) -> int:
    """Pages of a library cache for so many tokens: a power of two, so that few programs serve all
    lengths."""
    return 1 << max(-(-tokens // page) - 1, 0).bit_length()


def one_row(tokens: np.ndarray, start: int, pages: int, pad: int) -> Batch:
    """A batch of one row in slot 0 over pages 0 .. pages - 1, padded to `pad` tokens."""
    padded = np.zeros((1, pad), np.int32)
    padded[0, : len(tokens)] = tokens
    return Batch(
        tokens=jnp.asarray(padded),
        start=jnp.array([start], jnp.int32),
        lengths=jnp.array([len(tokens)], jnp.int32),
        pages=jnp.arange(pages, dtype=jnp.int32)[None],
        slots=jnp.zeros((1,), jnp.int32),
    )


def here(
    dtype: str | None = None, ranks: int = 1, kernels: tuple[tuple[str, str], ...] = ()
) -> Context:
    """A context for this process's devices: the fastest kernels that run on them."""
    platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    if dtype is None:
        dtype = "float32" if platform == "cpu" else "bfloat16"
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype is {dtype!r}; allowed: float32, bfloat16")
    return Context(dtype=dtype, ranks=ranks, platform=platform, kernels=kernels)
