"""One parsing engine: generated text in, events out. One file for each format."""

from .formats import FORMATS, Format, choose, format_named
from .machine import Setup, Tool

__all__ = ["FORMATS", "Format", "Setup", "Tool", "choose", "format_named"]
