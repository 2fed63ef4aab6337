"""The prediction layers of the sparse families in pieces, over caches that hold no numbers, against
their goldens (whole: test_goldens)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from driver import GOLDEN

from sparkjax.mesh.context import Context
from sparkjax.model import Model
from sparkjax.models import cache as caches
from sparkjax.models.batch import Batch
from sparkjax.weights.safetensors import SafetensorsFile

PAGES, SIZE = 8, 16
RELATIVE, ABSOLUTE = 1e-4, 1e-3


def agree(out, ref):
    out = np.asarray(out).reshape(ref.shape)
    assert np.abs(out - ref).max() <= ABSOLUTE
    assert np.linalg.norm(out - ref) <= RELATIVE * np.linalg.norm(ref)


@pytest.mark.parametrize(
    "family",
    ["deepseek_v4", *(pytest.param(f, marks=pytest.mark.slow) for f in ("glm_moe_dsa", "glm5_next"))],
)
def test_drafts_equal_the_golden(family):
    context = Context()
    model = Model.load(GOLDEN / family, context=context)
    golden = SafetensorsFile(GOLDEN / family / "golden.safetensors")
    ids, greedy = golden.read("prompt_0.input_ids"), golden.read("prompt_0.greedy")
    rows = golden.read("mtp.rows")
    out = model.forward(ids)
    # What this family's layer reads of a token.
    hidden = out.residual if family == "deepseek_v4" else out.final
    following = np.concatenate([ids[1:], greedy[:1]]).astype(np.int32)
    declared = model.family.declare_draft_caches(model.config, 1)
    # What an earlier sequence left behind must not be seen.
    cache = {
        name: jnp.full(s.shape, jnp.nan, s.dtype)
        for name, s in caches.shapes(declared, caches.Sizes(PAGES, SIZE, 1), "float32").items()
    }

    @jax.jit
    def step(params, cache, batch, hidden):
        return model.family.draft(params, cache, batch, hidden, model.config, context)

    def feed(tokens, hidden, start, cache, width):
        count = len(tokens)
        pad = [(0, width - count)]
        batch = Batch(
            tokens=jnp.asarray(np.pad(tokens, pad))[None],
            start=jnp.array([start], jnp.int32),
            lengths=jnp.array([count], jnp.int32),
            pages=jnp.arange(PAGES, dtype=jnp.int32)[None],
            slots=jnp.zeros((1,), jnp.int32),
        )
        padded = np.pad(hidden, pad + [(0, 0)] * (hidden.ndim - 1), constant_values=np.nan)
        logits, carry, cache = step(model.params, cache, batch, jnp.asarray(padded)[None])
        return np.asarray(logits[0, :count]), np.asarray(carry[0, :count]), cache

    logits, carries = [], []
    for start in range(0, len(ids), 40):
        piece = slice(start, min(start + 40, len(ids)))
        found, carry, cache = feed(following[piece], hidden[piece], start, cache, 40)
        logits.append(found)
        carries.append(carry)
    logits, carry = np.concatenate(logits), np.concatenate(carries)
    agree(logits[rows], golden.read("prompt_0.mtp.logits"))
    agree(carry[rows], golden.read("prompt_0.mtp.carry"))

    drafted, last = [logits[-1]], carry[-1:]
    for depth in range(2):
        token = np.array([drafted[-1].argmax()], np.int32)
        found, last, cache = feed(token, last, len(ids) + depth, cache, 1)
        drafted.append(found[0])
    expected = golden.read("prompt_0.mtp.draft_ids")
    assert [int(d.argmax()) for d in drafted] == expected.tolist()
    agree(np.stack(drafted), golden.read("prompt_0.mtp.draft_logits"))
