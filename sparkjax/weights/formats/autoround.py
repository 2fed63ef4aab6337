"""AutoRound checkpoints: GPTQ's or AWQ's tensors under its own `packing_format` names.

`auto_round:auto_gptq` is GPTQ v1 (zero points minus one), `auto_round` and `auto_round:gptqmodel`
are v2; neither has a g_idx, and 3-, 5-, 6- and 7-bit fields are a plain bit stream, never planar.
`auto_round:auto_awq` is AWQ. The remaining names are other libraries' formats under their own
tensor names. Source: auto-round 0.16.1, `export_to_autoround`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import CheckpointError
from .gptq import GptqTensor, gptq_tensor

MINUS_ONE = {
    "auto_round:auto_gptq": True,
    "auto_round:gptq": True,
    "auto_round": False,
    "auto_round:gptqmodel": False,
}
"""Whether a packing format stores zero points minus one."""


def autoround_gptq(
    qweight: np.ndarray,
    qzeros: np.ndarray,
    scales: np.ndarray,
    config: dict[str, Any],
    group: int | None,
    width: int | None,
) -> GptqTensor:
    """A GPTQ-shaped weight of an AutoRound checkpoint.

    Raises:
      CheckpointError: an unknown packing format, or shapes that do not fit.
    """
    packing = config.get("packing_format", "auto_round:auto_gptq")
    if packing not in MINUS_ONE:
        raise CheckpointError(
            f"packing_format is {packing!r}; allowed here: {', '.join(sorted(MINUS_ONE))}"
        )
    return gptq_tensor(
        qweight, qzeros, scales, None, group, minus_one=MINUS_ONE[packing], width=width
    )
