"""/status: the server's numbers as one JSON object, for pages and scripts that poll it."""

from __future__ import annotations

import time
from typing import Any

import sparkjax

from .front import Front

STARTED = time.time()


def status(front: Front) -> dict[str, Any]:
    """What the server does now, and its totals since it started.

    Rates come from the difference of two calls' totals over that of their `time` (seconds).
    """
    engine, limits = front.engine, front.engine.limits
    now, totals = engine.gauges(), front.metrics.totals()
    return {
        "model": front.served.id,
        "version": sparkjax.__version__,
        "state": "stalled" if front.stalled() is not None else engine.state,
        "failure": engine.failure,
        "time": time.time(),
        "started": STARTED,
        "requests": {
            "running": now.running,
            "prefilling": now.prefilling,
            "waiting": now.waiting,
            "slots": limits.slots,
            "queue": limits.queue,
            "finished": totals["request_success"],
        },
        "kv": {
            "pages": now.pages,
            "pages_total": now.pages_total,
            "page_tokens": limits.page_size,
            "context": front.longest,
        },
        "tokens": {
            "prompt": totals["prompt_tokens"],
            "generated": totals["generation_tokens"],
            "cache_queries": totals["prefix_cache_queries"],
            "cache_hits": totals["prefix_cache_hits"],
            "drafted": totals["spec_decode_num_draft_tokens"],
            "accepted": totals["spec_decode_num_accepted_tokens"],
        },
        "first_token": {
            "seconds": totals["time_to_first_token_seconds_sum"],
            "count": totals["time_to_first_token_seconds_count"],
        },
        "compilations": engine.compilations,
        "ranks": [
            {"rank": rank, "name": name, "state": stage, "ticks": ticks, "silent_seconds": silent}
            for rank, name, stage, ticks, silent in engine.ranks()
        ],
    }
