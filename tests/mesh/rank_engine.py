"""One rank of an engine without HTTP: python rank_engine.py JOB.json RANK.

The job: models (directories), peers ([] is one process), transport, requests a model, out (a
directory). Writes out/RANK.json: for each model every request's tokens, log-probabilities as hex,
and the operation digest.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import jax

from sparkjax import config as configuration
from sparkjax.engine.journal import Decoder
from sparkjax.engine.records import Sampling, Submit, Tick
from sparkjax.ranks import Session, leave
from sparkjax.serve import start

jax.config.update("jax_platforms", "cpu")
CACHE = Path(__file__).resolve().parents[2] / ".cache" / "xla-ranks"


def settings(job: dict, model: str, rank: int | None) -> configuration.Config:
    peers = job["peers"]
    sets = [f"model.path={model}", f"engine.compilation_cache={CACHE}", *job["sets"]]
    if peers:
        sets += [
            f"mesh.peers={','.join(peers)}", f"mesh.tensor_parallel={len(peers)}",
            f"mesh.transport={job['transport']}", f"mesh.rank={rank}", "mesh.silence_seconds=60",
        ]  # fmt: skip
    return configuration.load(overrides=sets, environ={})


def requests(count: int, vocab: int, limit: int) -> list[tuple[int, Submit, int | None]]:
    """(tick of arrival, request, ticks until its client leaves or None), the same on every call."""
    rng = random.Random(count)
    found = []
    at = 0
    for id in range(1, count + 1):
        sampled = rng.random() < 0.3
        prompt = tuple(rng.randrange(vocab) for _ in range(rng.randrange(1, 40)))
        submit = Submit(
            id,
            prompt,
            min(rng.randrange(1, 16), limit - len(prompt)),
            Sampling(temperature=0.8 if sampled else 0.0, seed=id, logprobs=2),
            prompt_logprobs=1 if rng.random() < 0.3 else None,
        )
        found.append((at, submit, rng.randrange(1, 8) if rng.random() < 0.2 else None))
        at += rng.randrange(3)
    return found


def decide(engine, count: int, vocab: int) -> None:
    """Rank 0: writes ticks until every request has ended."""
    pending = requests(count, vocab, engine.limits.context)
    leaving: dict[int, int] = {}
    tick = 0
    while pending or not engine.idle:
        submits, cancels = [], []
        while pending and pending[0][0] <= tick:
            _, submit, leaves = pending.pop(0)
            submits.append(submit)
            if leaves is not None:
                leaving[submit.id] = tick + leaves
        cancels = [id for id, when in leaving.items() if when == tick]
        yield engine.tick(tuple(submits), tuple(cancels))
        tick += 1


def follow(session, engine):
    decoder = Decoder()
    for frame in session.world.frames():
        if not frame:
            return
        for record in decoder.feed(frame):
            assert isinstance(record, Tick)
            yield engine.follow(record)


def bits(entry) -> list:
    return [entry.token, entry.logprob.hex(), [[t, p.hex()] for t, p in entry.top]]


def run(job: dict, rank: int) -> dict:
    found = {}
    session = None
    for model_path in job["models"]:
        config = settings(job, model_path, rank)
        if job["peers"] and session is None:
            session = Session.join(config)
            session.open_transport()
        model, engine = start(config, session)
        if session is not None:
            session.world.exchange(f"warm {model_path}")
        steps = (
            decide(engine, job["requests"], model.config.vocab)
            if rank == 0
            else follow(session, engine)
        )
        events: dict[int, dict] = {}
        for step in steps:
            for event in step:
                entry = events.setdefault(event.id, {"tokens": [], "logprobs": [], "prompt": []})
                entry["tokens"] += event.tokens
                entry["logprobs"] += [bits(x) for x in event.logprobs]
                entry["prompt"] += [bits(x) for x in event.prompt_logprobs]
                entry["finish"] = event.finish
        if session is not None and rank == 0:
            session.world.publish(b"")
        digest = f"{engine.scheduler.digest:016x}"
        found[model_path] = {"events": events, "digest": digest}
    if session is not None:
        session.world.exchange("done")
        if rank == 0:
            session.world.finish()
    return found


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    rank = int(sys.argv[2])
    found = run(job, rank)
    Path(job["out"], f"{rank}.json").write_text(json.dumps(found))
    leave(0)


if __name__ == "__main__":
    main()
