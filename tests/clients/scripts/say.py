"""What the scripted model is told and says, and how a script reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

HELLO = "Hello! 😀 How can I help you today?"
THOUGHT = "The user wants something."
CALL = 'call weather with {"city": "Oslo"}'


def weather(schema: str) -> dict[str, Any]:
    """A tool; `schema` is what an API calls its JSON schema."""
    return {
        "name": "weather",
        "description": "the weather of a city",
        schema: {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    }


def run(*scenarios: Callable[[], None]) -> None:
    """Plays scenarios; the first failure ends the script."""
    for scenario in scenarios:
        scenario()
        print("ok", scenario.__name__)
    print("all ok")
