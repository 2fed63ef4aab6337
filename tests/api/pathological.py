"""Constraints that somebody could send to keep a server busy, each of which is a 400.

    python -m tests.api.pathological

prints how long each takes to be refused while another client reads a stream, as one JSON receipt.
"""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from typing import Any


def deep(depth: int) -> dict[str, Any]:
    """Arrays inside each other."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def objects(count: int, values: int) -> dict[str, Any]:
    """All of `count` schemas, each one of `values` objects: values^count products."""
    parts = [
        {"anyOf": [{"type": "object", "properties": {f"p{i}": {"const": j}}, "required": [f"p{i}"]}
                   for j in range(values)]}
        for i in range(count)
    ]  # fmt: skip
    return {"allOf": parts}


PATHOLOGICAL: dict[str, dict[str, Any]] = {
    "slow number": {"guided_json": {"type": "integer", "multipleOf": 999983}},
    "two slow numbers": {"guided_json": {"allOf": [{"type": "integer", "multipleOf": n} for n in (999961, 999979)]}},
    "deep schema": {"guided_json": deep(55)},
    "10,000 deep as text": {"guided_json": '{"items":' * 10_000 + "{}" + "}" * 10_000},
    "10,000 deep as JSON": {"guided_json": None},  # see `body`
    "exponential allOf": {"guided_json": objects(12, 4)},
    "huge array": {"guided_json": {"type": "array", "maxItems": 10**9}},
    "huge string": {"guided_json": {"type": "string", "minLength": 10**7}},
    "6,000 properties": {"guided_json": {"type": "object", "properties": {f"p{i}": {} for i in range(6000)}}},
    "nested repeats": {"guided_regex": "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"},
    "huge repeat": {"guided_regex": "(ab){1000000000}"},
    "parentheses": {"guided_regex": "(" * 10_000 + "a" + ")" * 10_000},
    "bad escape": {"guided_regex": r"\q"},
    "bad code point": {"guided_regex": r"\x{110000}"},
    "open class": {"guided_regex": "[a-"},
    "look-around": {"guided_regex": "(?=a)(?!b)" * 100 + "a"},
    "back reference": {"guided_regex": r"(a+)\1"},
    "bad escape in a pattern": {"guided_json": {"type": "string", "pattern": r"^\q$"}},
    "huge repeat in a pattern": {"guided_json": {"type": "string", "pattern": "^((a{1,999}){1,999}){1,999}$"}},
    "many rules": {
        "guided_grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1} | r{i + 1} r{i + 1}" for i in range(2000)) + '\nr2000: "x"'
    },
    "left recursion": {"guided_grammar": "start: start"},
    "terminal of itself": {"guided_grammar": 'start: A\nA: "a" A'},
    "deep GBNF": {"guided_grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
    "deep Lark": {"guided_grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
    "self reference": {"guided_json": {"$ref": "#"}},
    "circle": {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
    "large": {"guided_regex": "a" * 300_000},
    "20,000 choices": {"guided_choice": [f"choice {i}" for i in range(20_000)]},
}  # fmt: skip


def body(name: str) -> bytes:
    """A request with one of the constraints."""
    asked = {"model": "toy", "messages": [{"role": "user", "content": "x"}], **PATHOLOGICAL[name]}
    text = json.dumps(asked)
    if name == "10,000 deep as JSON":
        text = text.replace("null", '{"items":' * 10_000 + "{}" + "}" * 10_000)
    return text.encode()


def main() -> None:
    """See the module."""
    import httpx

    from .conftest import Api, Socket
    from .fake_engine import speak

    api = Api(script=speak("hello world " * 30))
    api.core.step_seconds = 0.01
    server = Socket(api)
    gaps: list[float] = []
    stop = threading.Event()

    def listen() -> None:
        asked = {"model": "toy", "prompt": "x", "max_tokens": 300, "stream": True}
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while not stop.is_set():
                with client.stream("POST", "/v1/completions", json=asked) as got:
                    before = time.monotonic()
                    for _ in got.iter_raw():
                        gaps.append(time.monotonic() - before)
                        before = time.monotonic()

    headers = {"content-type": "application/json"}
    with httpx.Client(base_url=server.url, timeout=60, headers=headers) as client:

        def ask(content: bytes) -> httpx.Response:
            return client.post("/v1/chat/completions", content=content)

        ask(json.dumps({**json.loads(body("bad escape")), "guided_regex": "a"}).encode())
        listener = threading.Thread(target=listen)
        listener.start()
        seconds: dict[str, float] = {}
        accepted: list[str] = []
        for name in PATHOLOGICAL:
            begun = time.monotonic()
            response = ask(body(name))
            seconds[name] = round(time.monotonic() - begun, 3)
            if response.status_code != 400:
                accepted.append(name)
        stop.set()
        listener.join()
    server.close()
    api.close()
    receipt = {
        "sent": len(seconds), "accepted": accepted, "median_s": statistics.median(seconds.values()),
        "worst_s": max(seconds.values()), "seconds": seconds, "load": os.getloadavg()[0],
        "stream_gap_s": {"median": round(statistics.median(gaps), 4), "worst": round(max(gaps), 3)},
    }  # fmt: skip
    print(json.dumps(receipt, indent=1))


if __name__ == "__main__":
    main()
