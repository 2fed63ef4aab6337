"""What production parsers make of outputs, whole and cut everywhere."""

from __future__ import annotations

import pytest
from parsing_support import FAMILIES, cases, cut

from sparkjax.text.events import ToolArgumentsDelta


@pytest.mark.parametrize("family", FAMILIES)
def test_every_case_whole_and_by_tokens(family):
    wrong = [
        (case.id, message)
        for case in cases(family)
        for message in (case.message(), case.message(case.tokens()))
        if not case.accepts(message)
    ]
    assert wrong == []


@pytest.mark.parametrize("family", FAMILIES)
def test_every_case_cut_at_every_place(family):
    """In two at every place, into single characters, and into pieces."""
    for case in cases(family):
        for pieces in (case.pieces, case.tokens()):
            whole = case.message(pieces)
            for size in (1, 3, 8):
                assert case.message(cut(pieces, [size])) == whole, (case.id, size)
        if case.pieces[0][0] is None:
            whole, text = case.message(), case.text
            # A place in the middle of a long text is like the one before it.
            for at in range(1, len(text), 1 if len(text) < 400 else 29):
                halves = [(None, text[:at]), (None, text[at:])]
                assert case.message(halves) == whole, (case.id, at)


@pytest.mark.parametrize("family", FAMILIES)
def test_T07_long_string_arguments_stream_while_they_are_generated(family):
    """A call's first piece comes long before its last character, and many pieces follow."""
    case = next(c for c in cases(family) if c.id.endswith("-long"))
    parser = case.format.make(case.setup())
    places = []
    for at in range(0, len(case.text), 4):
        events = parser.feed(case.text[at : at + 4])
        places += [at for e in events if isinstance(e, ToolArgumentsDelta)]
    assert len(places) > 300 and places[0] < len(case.text) / 5
