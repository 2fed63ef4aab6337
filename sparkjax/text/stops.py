"""Stop strings in streamed text."""

from __future__ import annotations


class StopMatcher:
    """Finds the first stop string in a stream, holding back as little text as possible.

    Text is released at once but for the longest tail that is the beginning of a stop string. The
    match that ends first in the text wins; if several end together, the longest. The stop string
    and what follows are never released. Results do not depend on the chunks. Aho and Corasick's
    automaton (1975): time linear in the text.

    Args:
      stops: stop strings, none of them empty.

    Raises:
      ValueError: an empty stop string.
    """

    def __init__(self, stops: tuple[str, ...]):
        if "" in stops:
            raise ValueError(f"stop strings are {list(stops)!r}; an empty one is not allowed")
        self._next, self._fail, self._stop = _automaton(stops)
        self._depth = _depths(self._next)
        self._state = 0
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes more text.

        Returns:
          (emit, matched): the text that is certain not to belong to a stop string, and the stop
          string once one was found. After that nothing more is emitted.
        """
        if self._matched is not None:
            return "", self._matched
        state, steps, fail = self._state, self._next, self._fail
        for i, char in enumerate(text):
            while state and char not in steps[state]:
                state = fail[state]
            state = steps[state].get(char, 0)
            if (found := self._stop[state]) is not None:
                seen = self._held + text[: i + 1]
                self._matched, self._held = found, ""
                return seen[: len(seen) - len(found)], found
        seen = self._held + text
        keep = len(seen) - self._depth[state]
        self._state, self._held = state, seen[keep:]
        return seen[:keep], None

    def flush(self) -> str:
        """The held text at the end of the stream, when no stop string was completed."""
        held, self._held, self._state = self._held, "", 0
        return held


def _automaton(stops: tuple[str, ...]):
    """(transitions, failure links, stop string that ends here or None) of each trie node."""
    steps: list[dict[str, int]] = [{}]
    ends: list[str | None] = [None]
    for stop in stops:
        node = 0
        for char in stop:
            if char not in steps[node]:
                steps[node][char] = len(steps)
                steps.append({})
                ends.append(None)
            node = steps[node][char]
        ends[node] = stop
    fail = [0] * len(steps)
    queue = list(steps[0].values())
    for node in queue:
        for char, child in steps[node].items():
            back = fail[node]
            while back and char not in steps[back]:
                back = fail[back]
            fail[child] = steps[back].get(char, 0)
            # A node is longer than what it falls back to: its own stop string wins.
            ends[child] = ends[child] if ends[child] is not None else ends[fail[child]]
            queue.append(child)
    return steps, fail, ends


def _depths(steps: list[dict[str, int]]) -> list[int]:
    depths = [0] * len(steps)
    for node, children in enumerate(steps):
        for child in children.values():
            depths[child] = depths[node] + 1
    return depths
