"""What is wrong with a checkpoint, said once and clearly."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint file that cannot be used as it is.

    The message names the file, the field or tensor, its value, and what would be allowed.
    """
