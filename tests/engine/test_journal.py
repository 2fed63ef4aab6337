import itertools
import math
import os
import signal
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import sparkjax
from sparkjax.engine import journal
from sparkjax.engine.journal import Decoder, JournalError, JournalWriter, encode, read_journal
from sparkjax.engine.records import Limits, Sampling, Settings, Submit, Tick

ints = st.integers(-(2**63), 2**64 - 1)
words = st.integers(0, 2**64 - 1)
numbers = st.floats(allow_nan=False)
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=40).map(tuple)
samplings = st.builds(
    Sampling,
    temperature=numbers,
    top_k=ints,
    top_p=numbers,
    seed=words,
    logit_bias=st.lists(st.tuples(st.integers(0, 2**20), numbers), max_size=3).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
)
submits = st.builds(
    Submit,
    id=words,
    tokens=tokens,
    max_tokens=ints,
    sampling=samplings,
    stop_ids=tokens,
    prompt_logprobs=st.none() | st.integers(0, 20),
)
ticks = st.builds(
    Tick,
    number=words,
    submits=st.lists(submits, max_size=3).map(tuple),
    cancels=st.lists(words, max_size=3).map(tuple),
    stops=st.lists(words, max_size=3).map(tuple),
    digest=words,
)
limits = st.builds(
    Limits,
    slots=ints,
    pages=ints,
    page_size=ints,
    context=ints,
    queue=ints,
    tiles=tokens,
    rows=tokens,
    admission=st.text(max_size=9),
)
headers = st.builds(
    Settings,
    version=st.text(max_size=9),
    limits=limits,
    digests=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
)
journals = st.lists(ticks | headers, max_size=5)


def stream(records) -> bytes:
    return b"".join(map(encode, records))


def frame(payload: bytes) -> bytes:
    head = struct.pack(">II", len(payload), zlib.crc32(payload))
    return head + struct.pack(">I", zlib.crc32(head)) + payload


@settings(deadline=None)
@given(journals, st.lists(st.integers(0, 2000), max_size=12))
def test_any_chunking_gives_the_records(records, cuts):
    data, decoder, got = stream(records), Decoder(), []
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        got += decoder.feed(data[start:end])
    assert got == records
    assert (decoder.pending, decoder.offset) == (0, len(data))


def test_byte_by_byte():
    records = [Tick(n, cancels=(n,)) for n in range(3)]
    decoder = Decoder()
    assert [r for byte in stream(records) for r in decoder.feed(bytes([byte]))] == records


@settings(deadline=None)
@given(journals.filter(bool), st.data())
def test_a_flipped_bit_is_found(records, data):
    good = stream(records)
    bit = data.draw(st.integers(0, len(good) * 8 - 1))
    bad = bytearray(good)
    bad[bit // 8] ^= 1 << bit % 8
    with pytest.raises(JournalError, match="byte"):
        Decoder().feed(bad)


@settings(deadline=None)
@given(st.binary(max_size=200))
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\x83\xa4type\xa4tick\xa6number\x01\xa7cancels\xdd\x7f\xff\xff\xff")
@example(b"\x83\xa4type\xa4tick\xa6number\x01\xa7submits\xdd\x7f\xff\xff\xff")
@example(b"\x91" * 200)
@example(b"\x82\xa4type\xa4tick\xa6number\xa11")
@example(b"\x83\xa4type\xa4tick\xa6number\x01\xa4what\x01")
@example(b"\x82\xa4type\xa4tock\xa6number\x01")
@example(b"\x81\xa4type\xa4tick")
def test_hostile_payloads_in_sound_frames(payload):
    with pytest.raises(JournalError, match="not a record"):
        Decoder().feed(frame(payload))


@settings(deadline=None)
@given(st.binary(min_size=12, max_size=200))
def test_noise_is_refused_at_its_first_header(noise):
    with pytest.raises(JournalError, match="byte 0"):
        Decoder().feed(noise)


def test_a_length_above_the_cap_is_refused_before_its_bytes_come():
    head = struct.pack(">II", journal.MAX_FRAME + 1, 0)
    with pytest.raises(JournalError, match="byte 0: a frame of 67108865 bytes"):
        Decoder().feed(head + struct.pack(">I", zlib.crc32(head)))


def test_a_record_above_the_cap_is_not_written(monkeypatch):
    monkeypatch.setattr(journal, "MAX_FRAME", 100)
    with pytest.raises(JournalError, match=r"Tick of [0-9]+ bytes; a frame holds 100"):
        encode(Tick(1, cancels=tuple(range(1000, 1200))))


def test_what_64_bits_cannot_hold():
    with pytest.raises(JournalError, match="cannot encode a Tick"):
        encode(Tick(1, digest=2**64))


def test_a_broken_stream_stays_broken():
    decoder = Decoder()
    with pytest.raises(JournalError) as first:
        decoder.feed(b"\0" * 12)
    with pytest.raises(JournalError) as second:
        decoder.feed(encode(Tick(1)))
    assert str(first.value) == str(second.value)


def test_numbers_are_exact():
    values = (0.1, 5e-324, -0.0, math.inf, 1.7976931348623157e308)
    sampling = Sampling(seed=2**64 - 1, logit_bias=tuple(enumerate(values)))
    tick = Tick(0, (Submit(0, (1,), 1, sampling),), digest=2**63 + 1)
    [got] = Decoder().feed(encode(tick))
    assert got == tick
    assert [v.hex() for _, v in got.submits[0].sampling.logit_bias] == [v.hex() for v in values]


def test_a_plain_tick_is_small():
    assert len(encode(Tick(1000, digest=2**63))) < 50


# The file.


def test_append_and_read(tmp_path):
    path = tmp_path / "log"
    records = [Tick(n, cancels=(n,)) for n in range(6)]
    for part in (records[:4], records[4:]):
        with JournalWriter(path) as writer:
            for record in part:
                writer.write(record)
                assert read_journal(path).records[-1] == record  # flushed at once
    assert read_journal(path) == journal.Journal(tuple(records), 0)


@pytest.mark.parametrize("lost", [1, 10, 20])
def test_a_torn_tail_is_reported_and_then_written_over(tmp_path, lost):
    path = tmp_path / "log"
    whole = stream([Tick(1), Tick(2)])
    path.write_bytes(whole[:-lost])
    torn = len(encode(Tick(2))) - lost
    assert read_journal(path) == journal.Journal((Tick(1),), torn)
    with JournalWriter(path) as writer:
        writer.write(Tick(3))
    assert read_journal(path) == journal.Journal((Tick(1), Tick(3)), 0)


def test_damage_before_the_end_is_an_error(tmp_path):
    path = tmp_path / "log"
    data = bytearray(stream([Tick(1), Tick(2), Tick(3)]))
    at = len(encode(Tick(1)))
    data[at + journal.HEADER + 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(JournalError, match=f"byte {at}: damaged frame"):
        read_journal(path)
    with pytest.raises(JournalError, match=f"byte {at}"):
        JournalWriter(path)
    assert path.read_bytes() == data


def test_killed_while_writing(tmp_path):
    path = tmp_path / "log"
    code = f"""
from sparkjax.engine.journal import JournalWriter
from sparkjax.engine.records import Tick
writer = JournalWriter({str(path)!r})
for number in range(10**9):
    writer.write(Tick(number, cancels=tuple(range(500))))
    if number == 20: print(flush=True)
"""
    root = Path(sparkjax.__file__).parent.parent
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=root
    ) as process:
        process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
    records = read_journal(path).records
    assert len(records) > 20
    assert [record.number for record in records] == list(range(len(records)))


def test_unknown_fields_of_a_newer_version_are_refused():
    payload = msgspec.msgpack.encode({"type": "tick", "number": 1, "verdicts": []})
    with pytest.raises(JournalError, match="verdicts"):
        Decoder().feed(frame(payload))
