"""Checkpoint files: reading, formats, and loading into (sharded) arrays."""
