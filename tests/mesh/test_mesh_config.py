"""Settings of a world that do not go together are named, and ranks may differ only where they may."""

from __future__ import annotations

import pytest

from sparkjax import config
from sparkjax.config import ConfigError, load, shared

TWO = ["mesh.peers=a:1,b:1", "mesh.tensor_parallel=2"]


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["mesh.peers=a:1,b:1"], "mesh.tensor_parallel is 1; mesh.peers names 2 ranks"),
        ([*TWO, "mesh.rank=2"], "mesh.rank is 2; mesh.peers has 2 ranks"),
        (["mesh.peers=a:1,a:1", "mesh.tensor_parallel=2"], "each rank needs an address of its own"),
        (["mesh.peers=a:1,b:x", "mesh.tensor_parallel=2"], "'b:x' has no port from 1 to 65535"),
        (["mesh.peers=a,0.0.0.0", "mesh.tensor_parallel=2"], "'0.0.0.0' names no one host"),
    ],
)
def test_what_does_not_go_together_is_named(overrides: list[str], said: str):
    with pytest.raises(ConfigError, match=r"(?s).*") as caught:
        load(overrides=overrides, environ={})
    assert any(said in line for line in caught.value.problems)


def test_each_rank_may_have_its_own_paths_and_addresses_but_no_other_decisions():
    first = load(overrides=[*TWO, "mesh.rank=0", "model.path=/a", "http.port=1"], environ={})
    second = load(overrides=[*TWO, "mesh.rank=1", "model.path=/b", "mesh.secret=/s"], environ={})
    assert shared(first) == shared(second) and config.digest(first) == config.digest(second)
    other = load(overrides=[*TWO, "engine.slots=4", "kernels.linear=reference"], environ={})
    changed = {k for k, v in shared(other).items() if shared(first).get(k) != v}
    assert changed == {"engine.slots", "kernels.linear"}
