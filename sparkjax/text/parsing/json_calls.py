"""One call as a JSON object: {"name": N, "arguments": {...}}, read as it comes."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection

from ..characters import valid
from .json_text import JsonScanner, Malformed
from .machine import Machine
from .reader import Ended, Reading
from .values import json_value

ARGUMENTS = ("arguments", "parameters")


def read_json(
    machine: Machine, write: Callable[[str], object], stops: frozenset[str] = frozenset()
) -> Reading[None]:
    """Reads one JSON value and writes its text as it comes.

    Args:
      stops: see JsonScanner.

    Raises:
      Malformed: it is none.
      Ended: the text ended first.
    """
    scanner = JsonScanner(stops)
    while not scanner.done:
        text = machine.scan(scanner)
        if text:
            write(text)
        if scanner.broken:
            raise Malformed
        if not scanner.done:
            yield from machine.wait()


def read_whole(machine: Machine) -> Reading[str]:
    """The text of one JSON value. Raises as `read_json`."""
    parts: list[str] = []
    yield from read_json(machine, parts.append)
    return "".join(parts)


def read_call(machine: Machine, offered: Collection[str] | None, certain: bool) -> Reading[None]:
    """Reads the object of one call.

    The keys may come in any order; where the name comes first, arguments are written as they come.

    Args:
      offered: the names that a call may have; None is any.
      certain: nothing that follows can make it text.

    Raises:
      Malformed: it is none.
      Ended: the text ended first.
    """
    name = arguments = None
    written = False
    yield from machine.expect("{")
    yield from machine.space()
    while (yield from machine.peek()) != "}":
        key = json.loads((yield from _string(machine)))
        yield from machine.space()
        yield from machine.expect(":")
        yield from machine.space()
        if key == "name" and name is None:
            name = valid(json.loads((yield from _string(machine))))
            if not name or (offered is not None and name not in offered):
                raise Malformed
        elif key in ARGUMENTS and arguments is None and not written:
            first = yield from machine.peek()
            if first != "{" and offered is not None:  # without a marker nothing else tells a call
                if not first:
                    raise Ended
                raise Malformed
            if name is not None and first == "{":
                machine.name(name)
                written = True
                yield from read_json(machine, machine.argue)
            else:
                arguments = _object((yield from read_whole(machine)))
        else:
            yield from read_whole(machine)
        yield from machine.space()
        if (yield from machine.option(",")) is None:
            break
        yield from machine.space()
    yield from machine.expect("}")
    if name is None or (offered is not None and not written and arguments is None):
        raise Malformed
    if not written:
        machine.name(name)
        machine.argue(arguments or "{}")
    machine.end_call(certain)


def _string(machine: Machine) -> Reading[str]:
    char = yield from machine.peek()
    if char != '"':
        if not char:
            raise Ended
        raise Malformed
    return (yield from read_whole(machine))


def _object(text: str) -> str:
    """The arguments of a call: an object, the same inside a JSON string, or null for none."""
    value = json_value(text)
    if isinstance(value, str):
        try:
            text, value = value, json_value(value)
        except ValueError:
            raise Malformed from None
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise Malformed
    return text
