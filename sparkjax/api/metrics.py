"""Prometheus metrics: our names, and vLLM's for the dashboards that look for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.process_collector import ProcessCollector

import sparkjax

from .engine import EngineService

PREFIXES = ("sparkjax:", "vllm:")
LABELS = ("model_name", "engine")

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
            10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0,
         2.5, 5.0, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
_LONG = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
         240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000,
           200_000, 500_000, 1_000_000)  # fmt: skip
_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_COUNTS = (1, 2, 5, 10, 20, 50, 128)

COUNTERS = {
    "prompt_tokens": "Prompt tokens of requests that reached their first token",
    "generation_tokens": "Generated tokens",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache",
    "num_preemptions": "Sequences that were put back into the queue",
    "spec_decode_num_drafts": "Speculative drafts",
    "spec_decode_num_draft_tokens": "Speculative draft tokens",
    "spec_decode_num_accepted_tokens": "Accepted speculative draft tokens",
}
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token", _SECONDS),
    "inter_token_latency_seconds": ("Between the tokens of a request", _GAPS),
    "e2e_request_latency_seconds": ("From a request's arrival to its end", _LONG),
    "request_queue_time_seconds": ("From a request's arrival to its admission", _LONG),
    "request_prefill_time_seconds": ("From a request's admission to its first token", _LONG),
    "request_inference_time_seconds": ("From a request's admission to its end", _LONG),
    "request_decode_time_seconds": ("From a request's first token to its last", _LONG),
    "request_prompt_tokens": ("Prompt tokens of a request", _TOKENS),
    "request_generation_tokens": ("Generated tokens of a request", _TOKENS),
    "request_max_num_generation_tokens": ("Tokens that a request may generate", _TOKENS),
    "request_params_max_tokens": ("max_tokens of a request that gave it", _TOKENS),
    "request_params_n": ("n of a request", _COUNTS),
    "iteration_tokens_total": ("Tokens of a step, prompts at their first token", _STEP),
}
# Further names of the same numbers, which older dashboards look for.
OLDER = {
    "time_per_output_token_seconds": "inter_token_latency_seconds",
    "gpu_cache_usage_perc": "kv_cache_usage_perc",
}
GAUGES = {
    "num_requests_running": ("Sequences that hold a slot", lambda g: g.running),
    "num_requests_waiting": ("Requests in the queue", lambda g: g.waiting),
    "kv_cache_usage_perc": ("Share of cache pages in use, 0 to 1", lambda g: _share(g)),
}
OWN_GAUGES = {
    "num_requests_prefilling": ("Sequences whose prompt is not read yet", lambda g: g.prefilling),
    "kv_pages_total": ("Pages of the cache pool", lambda g: g.pages_total),
    "kv_pages_used": ("Pages of the cache pool in use", lambda g: g.pages),
}


class Metrics:
    """All metrics of one served model, in a registry of their own.

    Every number is kept once; a scrape writes it under all its names.
    """

    def __init__(self, model: str, engine: EngineService):
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        shared = self._shared = CollectorRegistry()  # without prefixes
        self._counters = {
            name: Counter(name, doc, LABELS, registry=shared).labels(**self._labels)
            for name, doc in COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(name, doc, LABELS, registry=shared, buckets=buckets).labels(
                **self._labels
            )
            for name, (doc, buckets) in HISTOGRAMS.items()
        }
        self._success = Counter(
            "request_success", "Requests that ended, by reason", (*LABELS, "finished_reason"),
            registry=shared,
        )  # fmt: skip
        for reason in ("stop", "length", "abort", "error"):  # a rate needs a zero to begin with
            self._success.labels(**self._labels, finished_reason=reason)
        self._refused = Counter(
            "sparkjax:requests_refused", "Requests answered with an error, by its code",
            (*LABELS, "code"), registry=self.registry,
        )  # fmt: skip
        shared.register(_Shared(engine, self._labels))
        self.registry.register(_Named(shared))
        self.registry.register(_Own(engine, self._labels))
        ProcessCollector(registry=self.registry)

    def count(self, name: str, amount: float = 1) -> None:
        """Adds to a counter."""
        self._counters[name].inc(amount)

    def observe(self, name: str, value: float) -> None:
        """Adds a value to a histogram."""
        self._histograms[name].observe(value)

    def ended(self, reason: str) -> None:
        """One choice ended: stop, length, abort (its client left) or error."""
        self._success.labels(**self._labels, finished_reason=reason).inc()

    def refused(self, code: str) -> None:
        """One request was answered with an error."""
        self._refused.labels(**self._labels, code=code).inc()

    def totals(self) -> dict[str, float]:
        """Sums since the start: counters by name, histograms as NAME_sum and NAME_count."""
        found: dict[str, float] = {}
        for metric in self._shared.collect():
            for sample in metric.samples:
                if sample.name.endswith(("_total", "_sum", "_count")):
                    name = sample.name.removesuffix("_total")
                    found[name] = found.get(name, 0.0) + sample.value
        return found

    def render(self) -> tuple[bytes, str]:
        """(text, content type) for a scrape."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


class _Collector:
    """Reads at each scrape; says nothing before, when the engine may not run yet."""

    def describe(self) -> list[Metric]:
        """See prometheus_client's Collector."""
        return []


class _Named(_Collector):
    """The metrics of another registry under every prefix and older name."""

    def __init__(self, registry: CollectorRegistry):
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        for metric in self._registry.collect():
            names = [metric.name, *(old for old, new in OLDER.items() if new == metric.name)]
            for name in (prefix + name for prefix in PREFIXES for name in names):
                renamed = Metric(name, metric.documentation, metric.type)
                renamed.samples = [
                    sample._replace(name=name + sample.name.removeprefix(metric.name))
                    for sample in metric.samples
                    if not sample.name.endswith("_created")
                ]
                yield renamed


class _Shared(_Collector):
    """What is read from the engine and has a name elsewhere too."""

    def __init__(self, engine: EngineService, labels: dict[str, str]):
        self._engine, self._labels = engine, labels

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        now, limits = self._engine.gauges(), self._engine.limits
        for name, (doc, read) in GAUGES.items():
            yield _family(GaugeMetricFamily, name, doc, self._labels, read(now))
        sizes = {"block_size": str(limits.page_size), "num_gpu_blocks": str(limits.pages)}
        labels = self._labels | sizes
        yield _family(GaugeMetricFamily, "cache_config_info", "Sizes of the caches", labels, 1)


class _Own(_Collector):
    """What is read from the engine and only this server has."""

    def __init__(self, engine: EngineService, labels: dict[str, str]):
        self._engine, self._labels = engine, labels

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        engine, now = self._engine, self._engine.gauges()
        values = {name: (doc, read(now)) for name, (doc, read) in OWN_GAUGES.items()} | {
            "engine_ready": ("1 while it takes requests", engine.state == "ready"),
            "engine_failed": ("1 once it is dead", engine.state == "failed"),
            "engine_stalled_seconds": (
                "Time since its last progress under load",
                engine.heartbeat(),
            ),
        }
        for name, (doc, value) in values.items():
            yield _family(GaugeMetricFamily, f"sparkjax:{name}", doc, self._labels, value)
        yield _family(
            CounterMetricFamily, "sparkjax:compilations", "Programs compiled after readiness: a bug if any",
            self._labels, engine.compilations,
        )  # fmt: skip
        version = {"version": sparkjax.__version__}
        yield _family(GaugeMetricFamily, "sparkjax:build_info", "Version", version, 1)


def _family(kind: Any, name: str, doc: str, labels: dict[str, str], value: float) -> Metric:
    family = kind(name, doc, labels=tuple(labels))
    family.add_metric(list(labels.values()), float(value))
    return family


def _share(gauges: Any) -> float:
    return gauges.pages / gauges.pages_total if gauges.pages_total else 0.0
