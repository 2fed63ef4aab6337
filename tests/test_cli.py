"""The `sparkjax` command: help, errors in words, and the terminal client against a stub server."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import sparkjax
import sparkjax.serve
from sparkjax import __version__
from sparkjax.cli.app import app
from sparkjax.cli.chat import Chat
from sparkjax.cli.client import Client, ClientError

VERBS = ["serve", "chat", "generate", "score", "verify", "config", "bench", "profile"]


@pytest.fixture
def cli(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments, **more: CliRunner().invoke(app, list(map(str, arguments)), **more)


class Stub(ThreadingHTTPServer):
    """Answers like the server does: `pieces` as deltas, then usage; `refuse` as an error."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pieces = ["Red", ", blue", ""]
        self.refuse: tuple[int, Any] | None = None
        self.cut = False
        self.requests: list[tuple[str, dict[str, Any], Any]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Stub

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._json(200, {"object": "list", "data": [{"id": "small"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body, self.headers.get("Authorization")))
        if self.server.refuse:
            self._json(*self.server.refuse)
        elif self.path == "/admin/profile":
            self._json(200, {"directory": body["directory"], "seconds": body["seconds"]})
        else:
            self._stream("chat" in self.path)

    def _json(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, chat: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()

        def event(**value: Any) -> None:
            self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

        if chat:
            event(choices=[{"delta": {"role": "assistant"}, "finish_reason": None}])
        self.wfile.write(b": keep-alive\n\n")
        for piece in self.server.pieces:
            event(choices=[{"delta": {"content": piece}} if chat else {"text": piece}])
        if self.server.cut:
            return
        event(choices=[{"delta": {}, "text": "", "finish_reason": "stop"}])
        event(choices=[], usage={"prompt_tokens": 5, "completion_tokens": 3})
        self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture
def stub() -> Iterator[Stub]:
    server = Stub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


# --- the command itself


def test_help_lists_every_verb(cli):
    result = cli("--help")
    assert result.exit_code == 0
    assert all(f" {verb} " in result.output for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(cli, verb):
    result = cli(verb, "--help")
    assert result.exit_code == 0 and "Usage:" in result.output


def test_version(cli):
    assert cli("--version").output.strip() == f"sparkjax {__version__}"


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["config"]])
def test_help_and_config_do_not_wait_for_jax(arguments):
    code = (
        "import sys; sys.argv[1:] = sys.argv[1:]\n"
        "from sparkjax.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'jax', 'numpy', 'flax', 'httpx'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines()[-1] == "[]"


def test_the_shell_completes_verbs():
    code = "import sys; sys.argv[0] = 'sparkjax'; from sparkjax.cli import main; main()"
    asked = {
        "_SPARKJAX_COMPLETE": "complete_bash", "COMP_WORDS": "sparkjax ser", "COMP_CWORD": "1",
        "PYTHONPATH": str(Path(sparkjax.__file__).parent.parent),
    }  # fmt: skip
    run = subprocess.run([sys.executable, "-c", code], env=asked, capture_output=True, text=True)
    assert run.stdout.split() == ["serve"], run.stderr


def test_config_prints_values_and_sources(cli, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("http:\n  port: 81\n")
    lines = cli("config", "-c", path, "-s", "engine.slots=3").output.splitlines()
    words = {line.split()[0]: line.split()[1:] for line in lines if line.strip()}
    assert words["http.port"] == ["81", f"{path}:2"]
    assert words["engine.slots"] == ["3", "command", "line"]
    assert words["log.level"] == ["info", "default"]
    assert len(words["digest"][0]) == 64


def test_config_docs_and_json(cli):
    assert "one of grow, reserve" in cli("config", "--docs").output
    read = json.loads(cli("config", "--json", "-s", "engine.tiles=16,64").output)
    rows = {row["key"]: row for row in read["keys"]}
    assert rows["engine.tiles"]["value"] == [16, 64]
    assert rows["engine.tiles"]["source"] == "command line"


def test_errors_are_words_without_a_traceback(cli):
    result = cli("config", "-s", "engine.slot=3")
    assert result.exit_code == 1
    assert "did you mean engine.slots?" in result.stderr
    assert "Traceback" not in result.output
    assert cli("config", "-c", "/nowhere.yaml").exit_code == 1
    assert cli("serve", "--nonsense").exit_code == 2


def test_serve_passes_one_configuration_and_the_exit_code(cli, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr("sparkjax.serve.run", lambda config: seen.append(config) or 2)
    arguments = ["--model", tmp_path, "--port", 0, "-s", "engine.slots=2"]
    assert cli("serve", *arguments).exit_code == 2
    (config,) = seen
    assert (config.model.path, config.http.port, config.engine.slots) == (str(tmp_path), 0, 2)
    result = cli("serve")
    assert result.exit_code == 1 and "model.path" in result.stderr


def test_the_module_serves_like_the_command(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr("sparkjax.serve.run", lambda config: seen.append(config) or 0)
    monkeypatch.setattr(sys, "argv", ["serve", "--model", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        sparkjax.serve.main()
    assert ended.value.code == 0 and seen[0].model.path == str(tmp_path)


@dataclasses.dataclass(frozen=True)
class _Report:
    path: str = "d"
    family: str = "f"
    dtype: str = "float32"
    ok: bool = True
    lines: tuple = ()

    def json(self) -> str:
        return json.dumps({"path": self.path, "ok": self.ok})


def test_verify_prints_a_line_each_and_exits_one_when_off(cli, monkeypatch):
    line = types.SimpleNamespace(what="logits", relative=1e-6, absolute=2e-5, ok=True, note="")
    off = types.SimpleNamespace(what="greedy", relative=None, absolute=None, ok=False, note="3 of 4")
    calls = []

    def verify(path: Path, dtype: str, tiles: int | None) -> _Report:
        calls.append((str(path), dtype, tiles))
        return _Report(str(path), ok="bad" not in path.name, lines=(line, off))

    monkeypatch.setattr("sparkjax.verify.verify", verify)
    good = cli("verify", "good", "--tile", 16, "--dtype", "bfloat16")
    assert good.exit_code == 0 and calls == [("good", "bfloat16", 16)]
    assert "ok  logits" in good.output and "1.00e-06   2.00e-05" in good.output
    assert "OFF greedy" in good.output and "3 of 4" in good.output
    assert cli("verify", "good", "bad").exit_code == 1
    assert json.loads(cli("verify", "bad", "--json").output)["ok"] is False


def test_verify_of_nothing_is_told_in_words(cli, tmp_path):
    result = cli("verify", tmp_path / "none")
    assert result.exit_code == 1 and "none" in result.stderr and "Traceback" not in result.output


class _Model:
    """Knows three tokens, and remembers how it was loaded."""

    tokenizer = types.SimpleNamespace(token_text=chr)

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def generate(self, prompt: str, **options: Any) -> Any:
        return types.SimpleNamespace(text=f"{prompt}! {sorted(options.items())}")

    def score(self, tokens: list[int]) -> list[float]:
        return [-0.5] * (len(tokens) - 1)


def test_generate_and_score_use_the_library(cli, monkeypatch, tmp_path):
    loads = []

    def load(path: str, dtype: str | None) -> _Model:
        loads.append((path, dtype))
        return _Model()

    monkeypatch.setattr(sparkjax, "load", load)
    # The cache of the suite's own programs stays the suite's.
    monkeypatch.setenv("SPARKJAX_ENGINE__COMPILATION_CACHE", "null")
    result = cli("generate", "-", "-m", tmp_path, "--max-tokens", 3, "--seed", 4, input="hi")
    assert result.output.startswith("hi! [('max_tokens', 3), ('seed', 4)")
    scored = cli("score", "abc", "-m", tmp_path, "--dtype", "bfloat16", "--json")
    read = json.loads(scored.output)
    assert read["logprobs"] == [None, -0.5, -0.5] and read["sum"] == -1.0
    assert "mean -0.5000" in cli("score", "abc", "-m", tmp_path).output
    assert loads[:2] == [(str(tmp_path), None), (str(tmp_path), "bfloat16")]
    assert cli("score", "abc").exit_code == 1
    short = cli("score", "a", "-m", tmp_path)
    assert short.exit_code == 1 and "at least 2 are needed" in short.stderr


# --- the client of a running server


def test_no_server_says_what_to_run(cli):
    for verb in (["chat"], ["bench"], ["profile", "/tmp/trace"]):
        result = cli(*verb, "--url", "http://127.0.0.1:9")
        assert result.exit_code == 1
        assert "No server answers at http://127.0.0.1:9" in result.stderr
        assert "make serve" in result.stderr


def test_client_streams_text_finish_and_usage(stub, tmp_path):
    key = tmp_path / "key"
    key.write_text("secret\nother\n")
    with Client(stub.url + "/v1/", key) as client:
        assert client.model() == "small"
        chunks = list(client.chat("small", [{"role": "user", "content": "q"}], seed=1))
        assert "".join(c.text for c in chunks) == "Red, blue"
        assert [c.finish for c in chunks if c.finish] == ["stop"]
        assert chunks[-1].usage == {"prompt_tokens": 5, "completion_tokens": 3}
        assert "".join(c.text for c in client.complete("small", [1, 2])) == "Red, blue"
    (path, body, authorization), (other, second, _) = stub.requests
    assert (path, other) == ("/v1/chat/completions", "/v1/completions")
    assert body["seed"] == 1 and body["stream"] and authorization == "Bearer secret"
    assert second["prompt"] == [1, 2]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((400, {"error": {"message": "temperature is -1"}}), "400: temperature is -1"),
        ((502, ["not", "ours"]), "502: ['not', 'ours']"),
        ((503, {"detail": "busy"}), "503: {'detail': 'busy'}"),
    ],
)
def test_client_repeats_what_the_server_refuses(stub, answer, words):
    stub.refuse = answer
    with Client(stub.url) as client, pytest.raises(ClientError) as caught:
        list(client.chat("small", []))
    assert str(caught.value) == words


def test_client_does_not_take_a_cut_stream_for_an_answer(stub):
    stub.cut = True
    with Client(stub.url) as client, pytest.raises(ClientError, match="before the answer"):
        list(client.chat("small", []))


def test_client_reports_an_error_inside_a_stream(stub, monkeypatch):
    monkeypatch.setattr(
        _Handler, "_stream",
        lambda self, chat: self._json(200, 0) or self.wfile.write(b"\n"),
    )  # fmt: skip
    with Client(stub.url) as client, pytest.raises(ClientError):
        list(client.chat("small", []))


def test_a_missing_key_file_is_told(cli, stub):
    result = cli("bench", "--url", stub.url, "--api-key-file", "/nowhere/key")
    assert result.exit_code == 1 and "/nowhere/key: No such file" in result.stderr


# --- chat


def test_chat_answers_a_pipe_with_the_bare_text(cli, stub):
    stub.pieces = ["Red\x1b[2J", " and\tblue\n"]
    result = cli("chat", "--url", stub.url, "--system", "Be brief.", input="Colours?\nThree.\n")
    assert result.output == "Red[2J and\tblue\n\n"
    (_, body, _) = stub.requests[0]
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Colours?\nThree."},
    ]


@pytest.fixture
def chat(stub) -> Iterator[Chat]:
    with Client(stub.url) as client:
        chat = Chat(client, "small", None, {})
        chat.out.file = io.StringIO()
        yield chat


def test_chat_keeps_the_conversation(chat, stub):
    chat.ask("one")
    chat.ask("two")
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2
    assert stub.requests[1][1]["messages"][1] == {"role": "assistant", "content": "Red, blue"}
    chat.command("/retry")
    assert stub.requests[2][1]["messages"] == stub.requests[1][1]["messages"]
    assert len(chat.messages) == 4
    chat.command("/reset")
    assert chat.messages == []


def test_chat_forgets_a_question_that_failed(chat, stub):
    chat.ask("one")
    stub.refuse = (503, {"error": {"message": "full"}})
    before = list(chat.messages)
    for line in ("/retry", None):
        with pytest.raises(ClientError, match="full"):
            chat.command(line) if line else chat.ask("two")
        assert chat.messages == before


def test_ctrl_c_stops_the_answer_and_keeps_it(chat, monkeypatch):
    def interrupted(*_: Any, **__: Any) -> Iterator[Any]:
        yield types.SimpleNamespace(text="Red", finish=None, usage=None)
        raise KeyboardInterrupt

    monkeypatch.setattr(chat.client, "chat", interrupted)
    chat.ask("one")
    assert chat.messages[-1] == {"role": "assistant", "content": "Red"}


def test_chat_commands(chat, stub, tmp_path):
    chat.command("/system You are terse.")
    chat.command("/set temperature 0.5")
    chat.command("/set stop END")
    chat.ask("one")
    body = stub.requests[0][1]
    assert (body["temperature"], body["stop"]) == (0.5, "END")
    assert body["messages"][0] == {"role": "system", "content": "You are terse."}
    chat.command("/set stop")
    assert chat.options == {"temperature": 0.5}
    chat.command("/reset")
    assert len(chat.messages) == 1
    chat.command(f"/save {tmp_path / 'c.json'}")
    assert json.loads((tmp_path / "c.json").read_text())["messages"] == chat.messages
    for line in ("/help", "/system", "/retry", "/save", "/save /nowhere/x", "/nonsense"):
        chat.command(line)
    assert "there is no /nonsense" in chat.out.file.getvalue()
    assert "nothing was asked yet" in chat.out.file.getvalue()


# --- bench and profile


def test_bench_counts_what_the_server_reports(cli, stub):
    arguments = ["--url", stub.url, "--streams", 3, "--requests", 7, "--prompt-tokens", 11]
    result = json.loads(cli("bench", *arguments, "--json").output)
    assert (result["requests"], result["streams"]) == (7, 3)
    assert (result["prompt_tokens"], result["completion_tokens"]) == (35, 21)
    prompts = [body["prompt"] for _, body, _ in stub.requests]
    assert {len(p) for p in prompts} == {11} and len(set(map(tuple, prompts))) == 7
    assert "output tok/s" in cli("bench", *arguments).output


def test_bench_ends_when_the_server_refuses(cli, stub):
    stub.refuse = (400, {"error": {"message": "too long"}})
    result = cli("bench", "--url", stub.url, "--streams", 4)
    assert result.exit_code == 1 and "too long" in result.stderr


def test_profile_asks_the_server(cli, stub, tmp_path):
    result = cli("profile", tmp_path, "--url", stub.url, "--seconds", 0.5)
    assert result.exit_code == 0 and str(tmp_path) in result.output
    assert stub.requests[0][:2] == ("/admin/profile", {"seconds": 0.5, "directory": str(tmp_path)})
