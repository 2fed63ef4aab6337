"""Model families: one file each, pure functions over shared layers."""
