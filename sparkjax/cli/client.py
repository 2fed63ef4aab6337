"""A client of the server's OpenAI API: just what the terminal needs."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

# The first token may wait for a queue and a long prompt; the server's comments keep it alive.
PATIENCE = httpx.Timeout(600, connect=5)


class ClientError(RuntimeError):
    """The server cannot be reached, or answered with an error."""


class Chunk(NamedTuple):
    """One event of a stream: a piece of text, and what the last ones bring."""

    text: str = ""
    finish: str | None = None
    usage: dict[str, Any] | None = None


def read_key(path: Path) -> str:
    """The first line of a file."""
    try:
        return path.read_text().split("\n")[0].strip()
    except OSError as error:
        raise ClientError(f"{path}: {error.strerror}") from None


class Client:
    """Talks to the server at `url`; the key, if any, is the first line of `key_file`."""

    def __init__(self, url: str, key_file: Path | None = None):
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {}
        if key_file is not None:
            headers["Authorization"] = f"Bearer {read_key(key_file)}"
        # A proxy for the world outside must not be asked for this machine.
        self._http = httpx.Client(
            base_url=self.url, headers=headers, timeout=PATIENCE, trust_env=not _loopback(self.url),
            limits=httpx.Limits(max_connections=None),
        )  # fmt: skip

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._http.close()

    def model(self) -> str:
        """The id of the first model that the server lists."""
        return str(self._json("GET", "/v1/models")["data"][0]["id"])

    def chat(self, model: str, messages: list[dict[str, str]], **options: Any) -> Iterator[Chunk]:
        """Streams one answer. Closing the iterator ends the request."""
        body = {"model": model, "messages": messages, **options}
        for event in self._stream("/v1/chat/completions", body):
            yield _chunk(event, lambda choice: choice.get("delta", {}).get("content"))

    def complete(self, model: str, prompt: str | list[int], **options: Any) -> Iterator[Chunk]:
        """Streams one continuation of a text or of token ids."""
        for event in self._stream("/v1/completions", {"model": model, "prompt": prompt, **options}):
            yield _chunk(event, lambda choice: choice.get("text"))

    def profile(self, seconds: float, directory: Path) -> dict[str, Any]:
        """Records a profiler trace on the server."""
        body = {"seconds": seconds, "directory": str(directory)}
        return self._json("POST", "/admin/profile", json=body, timeout=seconds + 120)

    def _json(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        with _told(self.url):
            response = self._http.request(method, path, **arguments)
        if response.is_error:
            raise _refusal(response)
        return dict(response.json())

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with _told(self.url), self._http.stream("POST", path, json=body) as response:
            if response.is_error:
                response.read()
                raise _refusal(response)
            for line in response.iter_lines():
                name, _, data = line.partition(":")
                if name != "data":
                    continue  # a comment that keeps the connection alive, or the end of an event
                if data.strip() == "[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ClientError(_message(event))
                yield event
            raise ClientError("the server ended the stream before the answer was complete")


def _chunk(event: dict[str, Any], text: Any) -> Chunk:
    choices = event.get("choices") or [{}]
    return Chunk(text(choices[0]) or "", choices[0].get("finish_reason"), event.get("usage"))


class _told:
    """Turns a transport's failure into words that say what to do."""

    def __init__(self, url: str):
        self.url = url

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            raise ClientError(
                f"No server answers at {self.url}. Start one in another terminal:\n"
                "    make serve                          the small model, from a checkout\n"
                "    sparkjax serve --config FILE.yaml   your own\n"
                "or name another address with --url."
            ) from None
        if isinstance(error, httpx.HTTPError | httpx.InvalidURL):
            raise ClientError(f"{self.url}: {error or type(error).__name__}") from None


def _refusal(response: httpx.Response) -> ClientError:
    try:
        return ClientError(f"{response.status_code}: {_message(response.json())}")
    except (ValueError, TypeError, AttributeError):
        return ClientError(f"{response.status_code} {response.reason_phrase}")


def _message(body: dict[str, Any]) -> str:
    error = body["error"] if isinstance(body, dict) and "error" in body else body
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)


def _loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
