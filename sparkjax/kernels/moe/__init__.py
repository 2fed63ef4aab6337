"""Mixture of experts: every token through its chosen experts."""

from __future__ import annotations

from .reference import experts

__all__ = ["experts"]
