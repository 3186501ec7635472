"""Prometheus metrics, and reading them back in Python.

Names, label sets and buckets are vLLM's with a prefix of our own choice, so that its dashboards work. A
metric is here only when this version can make it true. Each logger has its own registry: two engines
in a process do not meet. Made by `engine.stat_loggers`; read by `/metrics` and `LLM.get_metrics`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pagemill.config import CacheConfig
from pagemill.host_tier_plan import HostTierPlan
from pagemill.messages import FinishedStats, StepStats
from pagemill.outputs import FINISH_REASONS

_FIRST_TOKEN_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_REQUEST_BUCKETS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def length_buckets(max_value: int) -> list[int]:
    """Return 1, 2, 5, 10, 20, 50, ... up to `max_value`."""
    buckets: list[int] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale > max_value:
                return buckets
            buckets.append(step * scale)
        scale *= 10


@dataclass(frozen=True, slots=True)
class Metric:
    """One time series at this moment. `kind` is "counter", "gauge" or "histogram"."""

    name: str
    kind: str
    labels: dict[str, str]
    value: float  # of a histogram: the sum
    count: int | None = None  # histograms: observations
    buckets: dict[str, int] = field(default_factory=dict)  # upper bound -> cumulative count


class PrometheusStatLogger:
    """Keeps the metrics of one engine. Thread-safe, as prometheus_client is."""

    def __init__(
        self,
        prefix: str,
        model_name: str,
        cache: CacheConfig,
        max_model_len: int,
        num_blocks: int,
        tier: HostTierPlan | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self._prefix = prefix
        self._labels = {"model_name": model_name, "engine": "0"}
        self._make_gauges(cache, num_blocks, tier)
        self._make_counters()
        self._make_draft_counters()
        self._make_histograms(max_model_len)

    def record(self, stats: StepStats) -> None:
        """Add one step's statistics."""
        self._running.set(stats.queues.running)
        self._waiting.set(stats.queues.waiting)
        self._swapped.set(stats.queues.swapped)
        self._cache_usage.set(stats.kv_cache_usage)
        self._preemptions.inc(stats.num_preempted)
        self._prefix_queries.inc(stats.prefix_lookups.num_queried)
        self._prefix_hits.inc(stats.prefix_lookups.num_hits)
        self._drafts.inc(stats.drafts.num_drafts)
        self._draft_tokens.inc(stats.drafts.num_drafted)
        self._accepted_tokens.inc(stats.drafts.num_accepted)
        for place, count in enumerate(stats.drafts.accepted):
            self._accepted_at(place).inc(count)
        self._host_hits.inc(stats.prefix_lookups.num_host_hits)
        self._swap_preemptions.inc(stats.num_swapped_out)
        self._blocks_out.inc(stats.num_blocks_out)
        self._blocks_in.inc(stats.num_blocks_in)
        self._blocks_unwritten.inc(stats.num_blocks_unwritten)
        self._blocks_unread.inc(stats.num_blocks_unread)
        self._blocks_copied.inc(stats.num_blocks_copied)
        self._tier_usage.set(stats.host_tier_usage)
        self._prompt_tokens.inc(stats.num_prompt_tokens)
        self._generation_tokens.inc(stats.num_generation_tokens)
        if stats.iteration_tokens:
            self._iteration_tokens.observe(stats.iteration_tokens)
        for seconds in stats.time_to_first_token_s:
            self._first_token.observe(seconds)
        for seconds in stats.inter_token_latency_s:
            self._inter_token.observe(seconds)
        for deadline in stats.expired:
            self._expired[deadline].inc()
        for finished in stats.finished:
            self._record_finished(finished)

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return bytes(generate_latest(self.registry))

    def metrics(self) -> list[Metric]:
        """Return the metrics as objects."""
        return list(_read(self.registry))

    def _record_finished(self, finished: FinishedStats) -> None:
        self._success[finished.finish_reason].inc()
        self._request_prompt.observe(finished.num_prompt_tokens)
        self._request_generation.observe(finished.num_generation_tokens)
        self._e2e.observe(finished.e2e_s)
        for histogram, seconds in (
            (self._queue, finished.queue_s),
            (self._prefill, finished.prefill_s),
            (self._decode, finished.decode_s),
            (self._per_token, finished.time_per_output_token_s),
        ):
            if seconds is not None:
                histogram.observe(seconds)

    # ------------------------------------------------------------ making

    def _gauge(self, name: str, text: str) -> Gauge:
        metric = Gauge(self._name(name), text, list(self._labels), registry=self.registry)
        return metric.labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        metric = Counter(self._name(name), text, list(self._labels), registry=self.registry)
        return metric.labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        metric = Histogram(
            self._name(name), text, list(self._labels), registry=self.registry, buckets=buckets
        )
        return metric.labels(**self._labels)

    def _name(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    def _make_gauges(self, cache: CacheConfig, num_blocks: int, tier: HostTierPlan | None) -> None:
        self._running = self._gauge("num_requests_running", "Sequences being computed.")
        self._waiting = self._gauge("num_requests_waiting", "Sequences that wait to be computed.")
        self._swapped = self._gauge("num_requests_swapped", "Sequences in the swap space.")
        self._cache_usage = self._gauge("kv_cache_usage_perc", "KV blocks in use; 1 means all.")
        self._tier_usage = self._gauge(
            "host_tier_usage_perc", "Slots of the host tier that hold something; 1 means all."
        )
        if tier is not None:
            costs = tier.costs
            for name, text, seconds in (
                ("swap_out_block_seconds", "A block to the host tier.", costs.swap_out_s),
                ("swap_in_block_seconds", "A block from there.", costs.swap_in_s),
                (
                    "compute_block_seconds",
                    "Computing a block at a prompt's beginning.",
                    costs.recompute_s(0, cache.block_size),
                ),
            ):
                self._gauge(name, f"{text} Measured at start.").set(seconds)
        info = {
            **self._labels,
            "block_size": str(cache.block_size),
            "cache_dtype": cache.dtype,
            "enable_prefix_caching": str(cache.enable_prefix_caching),
            "gpu_memory_utilization": str(cache.gpu_memory_utilization),
            "kv_cache_memory_bytes": str(cache.kv_cache_memory_bytes),
            "num_gpu_blocks": str(num_blocks),
            "num_cpu_blocks": str(0 if tier is None else tier.num_slots),
        }
        name = self._name("cache_config_info")
        text = "How the KV cache is laid out; always 1."
        Gauge(name, text, list(info), registry=self.registry).labels(**info).set(1)

    def _make_counters(self) -> None:
        self._preemptions = self._counter("num_preemptions", "Sequences that lost their blocks.")
        self._prefix_queries = self._counter(
            "prefix_cache_queries", "Tokens that beginning requests looked up in the prefix cache."
        )
        self._prefix_hits = self._counter("prefix_cache_hits", "Tokens found there.")
        self._host_hits = self._counter(
            "prefix_cache_host_hits", "Tokens of them that came from the host tier."
        )
        self._swap_preemptions = self._counter(
            "num_preemptions_by_swap", "Preemptions that kept what was computed in the host tier."
        )
        self._blocks_out = self._counter(
            "swapped_out_blocks", "KV blocks written to the host tier."
        )
        self._blocks_in = self._counter("swapped_in_blocks", "KV blocks read back from it.")
        self._blocks_unwritten = self._counter(
            "swapped_out_blocks_failed", "KV blocks that could not be written there."
        )
        self._blocks_unread = self._counter(
            "swapped_in_blocks_failed", "KV blocks that could not be read, or were damaged there."
        )
        self._blocks_copied = self._counter("copied_blocks", "KV blocks copied for a writer.")
        self._prompt_tokens = self._counter(
            "prompt_tokens", "Tokens of prompts that were computed or found in the prefix cache."
        )
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        success = Counter(
            self._name("request_success"),
            "Requests that ended, by reason.",
            [*self._labels, "finished_reason"],
            registry=self.registry,
        )
        self._success = {
            reason: success.labels(**self._labels, finished_reason=reason)
            for reason in FINISH_REASONS
        }
        expired = Counter(
            self._name("request_deadline_exceeded"),
            "Requests that were dropped because a deadline of theirs passed.",
            [*self._labels, "deadline"],
            registry=self.registry,
        )
        self._expired = {
            deadline: expired.labels(**self._labels, deadline=deadline)
            for deadline in ("start", "end")
        }

    def _make_draft_counters(self) -> None:
        make = self._counter
        self._drafts = make("spec_decode_num_drafts", "Drafts that were computed with a step.")
        self._draft_tokens = make("spec_decode_num_draft_tokens", "Tokens of these drafts.")
        self._accepted_tokens = make(
            "spec_decode_num_accepted_tokens", "Draft tokens that the model sampled, too."
        )
        self._accepted_per_place = Counter(
            self._name("spec_decode_num_accepted_tokens_per_pos"),
            "Draft tokens that the model sampled, by their place in the draft.",
            [*self._labels, "position"],
            registry=self.registry,
        )

    def _accepted_at(self, place: int) -> Counter:
        return self._accepted_per_place.labels(**self._labels, position=str(place))

    def _make_histograms(self, max_model_len: int) -> None:
        lengths = length_buckets(max_model_len)
        make, seconds = self._histogram, _REQUEST_BUCKETS_S
        self._iteration_tokens = make(
            "iteration_tokens_total", "Tokens computed by a step.", _ITERATION_BUCKETS
        )
        self._first_token = make(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_BUCKETS_S
        )  # fmt: skip
        self._inter_token = make(
            "inter_token_latency_seconds", "Between two tokens of a sample.", _TOKEN_BUCKETS_S
        )
        self._per_token = make(
            "request_time_per_output_token_seconds",
            "A request's mean time between tokens.",
            _TOKEN_BUCKETS_S,
        )
        self._e2e = make("e2e_request_latency_seconds", "From arrival to the end.", seconds)
        self._queue = make("request_queue_time_seconds", "From arrival to the first step.", seconds)
        self._prefill = make(
            "request_prefill_time_seconds", "From the first step to the first token.", seconds
        )
        self._decode = make(
            "request_decode_time_seconds", "From the first token to the last.", seconds
        )
        self._request_prompt = make("request_prompt_tokens", "A request's prompt tokens.", lengths)
        self._request_generation = make(
            "request_generation_tokens", "A request's generated tokens, all samples.", lengths
        )


def _read(registry: CollectorRegistry) -> Iterator[Metric]:
    for family in registry.collect():
        if family.type != "histogram":
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    yield Metric(family.name, family.type, dict(sample.labels), sample.value)
            continue
        total, buckets, labels = 0.0, {}, {}
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                labels = {k: v for k, v in sample.labels.items() if k != "le"}
                buckets[sample.labels["le"]] = int(sample.value)
            elif sample.name.endswith("_sum"):
                total = sample.value
        count = buckets.get("+Inf", 0)
        yield Metric(family.name, "histogram", labels, total, count, buckets)
