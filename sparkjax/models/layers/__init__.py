"""Layers that families share: pure functions over (stacked parameters, layer index)."""
