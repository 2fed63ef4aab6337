"""A start that cannot work says what to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkjax import config, ranks, serve
from sparkjax.engine.journal import read_journal
from sparkjax.engine.records import Limits
from sparkjax.serve import StartupError

LIMITS = Limits(1, 1, 1, 1, 1, (1,), (1,))


def test_a_file_of_api_keys_is_looked_at_before_anything_is_loaded(tmp_path: Path, caplog, monkeypatch):
    """Not after minutes of loading."""
    monkeypatch.setattr(serve, "set_up_logging", lambda config: None)
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text("# none\n")
    binary.write_bytes(b"\xff\xfe")
    for path, words in ((tmp_path / "none", "No such file"), (empty, "no API key"), (binary, "utf-8")):
        given = config.load(None, [f"http.api_keys={path}", "model.path=/nonexistent"], {})
        assert serve.run(given) == serve.STARTUP_ERROR
        assert "http.api_keys" in caplog.messages[-1] and words in caplog.messages[-1]


def test_a_port_is_taken_by_one_server():
    with serve.take_port("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(StartupError, match=rf"http.port {port} cannot be used"):
            serve.take_port("127.0.0.1", port)
    serve.take_port("127.0.0.1", port).close()


def test_a_journal_that_is_none_is_named(tmp_path: Path):
    path = tmp_path / "log"
    given = config.load(None, [f"engine.journal={path}"], {})
    serve.crash_log(given, LIMITS)
    assert len(read_journal(path).records) == 1
    path.write_text("something that somebody wrote, and no journal")
    with pytest.raises(StartupError, match=rf"engine.journal {path}: byte 0.*no journal.*name another"):
        serve.crash_log(given, LIMITS)
    assert path.read_text().startswith("something")


def test_rank_0_is_ready_only_when_it_can_answer(monkeypatch, caplog):
    """A broken chat template ends the start of all ranks, and says so to them."""
    told: list[str] = []

    class World:
        failure = None
        states = None
        fail = staticmethod(told.append)

    class Session:
        rank, world, explain = 0, World, None

        def open_transport(self) -> None:
            pass

        def ready(self) -> None:
            raise AssertionError("not ready at all")

    def refuse(*_: object, **__: object) -> None:
        raise StartupError("chat_template.jinja: line 1: no template")

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(ranks.Session, "join", lambda given: Session())
    monkeypatch.setattr(serve, "start", lambda *_: (None, None))
    monkeypatch.setattr(serve, "serve_engine", refuse)
    monkeypatch.setattr(ranks, "leave", leave)
    peers = ["mesh.peers=127.0.0.1:1,127.0.0.1:2", "mesh.rank=0", "mesh.tensor_parallel=2"]
    with pytest.raises(SystemExit) as ended:
        ranks.run(config.load(None, [*peers, "http.port=0"], {}))
    assert ended.value.code == serve.STARTUP_ERROR
    assert told == ["rank 0 cannot start: chat_template.jinja: line 1: no template"]
    assert caplog.messages[-1] == "chat_template.jinja: line 1: no template"
