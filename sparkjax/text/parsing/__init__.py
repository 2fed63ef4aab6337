"""One parsing engine: generated text in, events out. One file for each format."""

from .formats import FORMATS, Format, choose, format_named, sample
from .machine import Machine, Setup, Start, Tool

__all__ = [
    "FORMATS",
    "Format",
    "Machine",
    "Setup",
    "Start",
    "Tool",
    "choose",
    "format_named",
    "sample",
]
