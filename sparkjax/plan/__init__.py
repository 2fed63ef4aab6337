"""Sizing a recipe for GB10 boxes on any machine."""
