"""Formats of strings without quotes."""

from __future__ import annotations

import re

import pytest

from sparkjax.structured.formats import FORMATS

TIMES = ["00:00:00Z", "23:59:59.25+14:00", "09:30:00-03:30"]
NO_TIMES = ["24:00:00Z", "9:30:00Z", "09:30:00", "09:60:00Z", "09:30:00+24:00", "09:30Z"]
DATES = ["0001-01-01", "1999-12-31", "2024-02-29", "2000-02-29", "2026-11-30"]
NO_DATES = ["0000-01-01", "2023-02-29", "1900-02-29", "2026-04-31", "2026-13-01", "26-1-1"]
CASES = {
    "time": (TIMES, NO_TIMES),
    "date": (DATES, NO_DATES),
    "date-time": (
        [f"{day}T{time}" for day in DATES for time in TIMES],
        [f"{DATES[0]} {TIMES[0]}", DATES[0], f"{NO_DATES[0]}T{TIMES[0]}", f"{DATES[0]}T{NO_TIMES[0]}"],
    ),
    "duration": (["P1Y2M3D", "PT4H5M6S", "P2W", "P1DT12H", "PT36H", "P1M"], ["P", "PT", "P1D2H", "1D", "P1Y3D", "P1WT1H"]),
    "email": (["a@b.c", "x.y+z@sub.example.org", "o'hara@host"], ["a", "@b", "a@", "a..b@c.d", "a@-b.c", "a b@c.d"]),
    "hostname": (["localhost", "a.b-c.example", "1.example"], ["-a", "a-", "a..b", ".a", "a_b", "x" * 64]),
    "ipv4": (["0.0.0.0", "255.1.20.99"], ["256.1.1.1", "1.1.1", "01.1.1.1", "1.1.1.1.1"]),
    "ipv6": (["::", "::1", "1::", "2001:db8::8a2e:370:7334", "1:2:3:4:5:6:7:8", "1::8", "1:2:3:4:5:6:7::"],
             ["1:2:3:4:5:6:7", ":::", "1::2::3", "12345::", "1:2:3:4:5:6:7:8:9", "g::"]),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000", "A" * 8 + "-AAAA-BBBB-cccc-" + "0" * 12],
             ["123e4567e89b12d3a456426614174000", "123e4567-e89b-12d3-a456-42661417400"]),
    "uri": (["https://example.org/a?b=c#d", "urn:isbn:0-486-27557-4", "mailto:a@b.c", "file:///tmp/x%20y"],
            ["example.org", "//a/b", "http://a b", "1http://a", "http://a/%zz"]),
}  # fmt: skip


def test_every_format_has_cases():
    assert CASES.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_what_its_document_says(name: str):
    good, bad = CASES[name]
    for text in good:
        assert re.fullmatch(FORMATS[name], text), text
    for text in bad:
        assert not re.fullmatch(FORMATS[name], text), text
