"""The process that judges grammars: verdicts, limits, successors."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import msgspec
import pytest

from sparkjax.structured import judge as judges
from sparkjax.structured.calls import Calls, Offered
from sparkjax.structured.judge import Judge, JudgeBusy
from sparkjax.structured.matcher import GrammarError
from sparkjax.structured.schema import SchemaError
from sparkjax.structured.sources import Wanted
from sparkjax.structured.worker import Vocabulary, byte_tokens

VOCABULARY = Vocabulary(300, {0: b"<end>", 7: b"<tag>"}, (0,))
SLOW = Wanted("json_schema", {"type": "integer", "multipleOf": 999983})


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    made = Judge(VOCABULARY)
    yield made
    made.close()


def test_verdicts(judge: Judge):
    assert judge.source(Wanted("choice", ["a"])).result().text.startswith("start: CHOICE")
    with pytest.raises(GrammarError, match="unclosed group"):
        judge.source(Wanted("regex", "(a")).result()
    with pytest.raises(SchemaError) as error:
        judge.source(Wanted("json_schema", {"items": {"pattern": "(?=a)"}})).result()
    assert error.value.path == "items.pattern" and "look-ahead" in error.value.message
    assert "start:" not in error.value.message, "the engine's own text is nobody's business"
    wrong = {"type": "object", "properties": {"s": {"type": "string", "pattern": "(?=a)"}}}
    for name in ("qwen", "hermes"):  # without quotes, and with
        calls = Calls(name, (Offered("f"), Offered("g", wrong)))
        with pytest.raises(SchemaError) as error:
            judge.source(Wanted("calls", msgspec.to_builtins(calls))).result()
        assert error.value.path == "g.parameters.properties.s.pattern"
    by_name = Wanted("lark", "start: <tag> <[7]>")
    assert judge.source(by_name).result().text
    with pytest.raises(GrammarError, match="unknown special token"):
        judge.source(Wanted("lark", "start: <none>")).result()


def test_the_same_constraint_is_judged_once(judge: Judge):
    wanted = Wanted("json_schema", {"type": "object", "properties": {"once": {}}})
    first = judge.source(wanted)
    assert first.result() == judge.source(wanted).result()
    assert judge.source(wanted).done(), "known"
    wrong = Wanted("json_schema", {"type": "once"})
    for _ in range(2):
        with pytest.raises(SchemaError):
            judge.source(wrong).result()


def test_T28_what_takes_too_long_is_given_up_and_the_next_one_is_served(judge: Judge):
    for _ in range(2):
        with pytest.raises(GrammarError, match=r"takes more than 0\.5 s to build"):
            judge.source(SLOW).result()
    assert judge.source(Wanted("regex", "after")).result()


def test_T28_what_kills_its_process_is_given_up(judge: Judge, monkeypatch):
    """A failed allocation ends the process, and only it."""
    monkeypatch.setattr(judges._Worker, "judge", lambda worker, wanted: worker._ask(b"?", 30))
    with pytest.raises(GrammarError, match="needs more than 1024 MiB"):
        judge.source(Wanted("regex", "killed")).result()
    monkeypatch.undo()
    assert judge.source(Wanted("regex", "next")).result()


def test_workers_that_are_gone_are_nobody_s_fault(judge: Judge):
    assert judge.source(Wanted("regex", "before")).result()
    for each in judge._workers:
        os.kill(each._process.pid, signal.SIGKILL)
        each._process.wait()
    assert judge.source(Wanted("regex", "behind")).result()


def test_too_many_at_a_time_are_sent_away(judge: Judge, monkeypatch):
    monkeypatch.setattr(judges, "WAITING", 2)
    slow = [Wanted("json_schema", {"type": "integer", "multipleOf": n}) for n in (999959, 999961)]
    running = [judge.source(each) for each in slow]
    with pytest.raises(JudgeBusy):
        judge.source(Wanted("regex", "late"))
    for each in running:
        with pytest.raises(GrammarError):
            each.result()
    assert judge.source(Wanted("regex", "late")).result()


def test_a_model_without_an_end_has_no_grammars():
    endless = Judge(Vocabulary(300, {}, ()))
    with pytest.raises(GrammarError, match="no token that ends"):
        endless.source(Wanted("regex", "a"))
    endless.close()


def test_every_byte_has_a_token_in_any_vocabulary():
    for size in (0, 3, 300, 1000):
        tokens = byte_tokens(Vocabulary(size, {0: b"<end>", 7: b"<tag>"}, (0, 9)))
        assert {bytes([b]) for b in range(256)} <= set(tokens)
        assert tokens[0] == b"<end>" and tokens[7] == b"<tag>" and tokens[9] == b""
