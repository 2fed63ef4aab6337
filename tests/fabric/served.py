"""On lab host 0: asks a world that starts, and prints what it answers as JSON.

python served.py URL MODEL PROMPTS.json SECONDS
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import urllib.request
from pathlib import Path


def post(url: str, body: dict) -> dict:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def main() -> None:
    url, model, path, seconds = sys.argv[1:]
    prompts = json.loads(Path(path).read_text())
    until = time.monotonic() + float(seconds)
    ready = False
    while not ready and time.monotonic() < until:
        time.sleep(1)
        with contextlib.suppress(OSError):
            ready = urllib.request.urlopen(f"{url}/ready", timeout=30).status == 200
    texts = []
    for prompt in prompts:
        body = {
            "model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0,
            "ignore_eos": True,
        }  # fmt: skip
        texts.append(post(f"{url}/v1/completions", body)["choices"][0]["text"])
    print("RESULT", json.dumps({"mode": "served", "texts": texts}), flush=True)


if __name__ == "__main__":
    main()
