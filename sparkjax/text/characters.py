"""Half of a surrogate pair: JSON can carry one, UTF-8 cannot."""

from __future__ import annotations


def valid(text: str) -> str:
    """Lone surrogates become U+FFFD; pairs become characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
