"""sparkjax through its HTTP server, streaming."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time

import httpx
import worker

import sparkjax


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def main() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    sets = {"model.path": sys.argv[1], "engine.context": 2048, "http.port": port, "log.level": "error"}
    command = [sys.executable, "-m", "sparkjax.serve"]
    for key, value in sets.items():
        command += ["--set", f"{key}={value}"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_ready(server, url)
        worker.serve({"sparkjax": sparkjax.__version__, "at": "HTTP, streaming"}, lambda p, n: run(url, p, n))
    finally:
        server.terminate()
        server.wait(30)


def wait_ready(server: subprocess.Popen, url: str) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise SystemExit("the server did not become ready")


def run(url: str, prompts: list[list[int]], tokens: int) -> float:
    stamps: list[list[float]] = [[] for _ in prompts]

    def stream(index: int) -> None:
        body = {
            "model": httpx.get(f"{url}/v1/models").json()["data"][0]["id"],
            "prompt": prompts[index],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "logprobs": 0,
            "ignore_eos": True,
        }
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        if choice.get("logprobs"):
                            count = len(choice["logprobs"]["tokens"])
                            stamps[index] += [time.perf_counter()] * count

    begin = time.perf_counter()
    threads = [threading.Thread(target=stream, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    running = max(times[0] for times in stamps)
    if tokens == 1:
        return len(prompts[0]) / (running - begin)
    produced = sum(t > running for times in stamps for t in times)
    return produced / (max(t for times in stamps for t in times) - running)


main()
