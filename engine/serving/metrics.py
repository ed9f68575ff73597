"""Metric families of the server, for the gateway's /metrics, and the thread that reports them to Triton's endpoint.

Each update of a Triton metric is a message between processes, so a thread reports all values once a second. Histograms
are reported as their `_bucket`, `_sum` and `_count` counters, because Triton's histograms accept single observations
only.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.core.draft_counts import ACCEPTED, DRAFTED, labels_of
from engine.errors import KINDS
from engine.serving.latency import BUCKETS_S, Histogram
from engine.serving.vllm_metrics import by_vllm_names

if TYPE_CHECKING:
    from engine.link.client import EngineClient
    from engine.serving.service import Service

log = logging.getLogger(__name__)

UPDATE_INTERVAL_S = 1.0
COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"


class Sample(NamedTuple):
    """One value of a metric family, as in the Prometheus text format."""

    family: str
    kind: str
    doc: str
    labels: tuple[tuple[str, str], ...]
    value: float
    suffix: str = ""  # appended to the family's name: _bucket, _sum or _count of a histogram


# family, kind, description, name of the engine's statistic
ENGINE_FAMILIES = (
    ("llm_requests_running", GAUGE, "Requests in the batch", "num_running"),
    ("llm_requests_waiting", GAUGE, "Requests the engine has accepted and not begun", "num_waiting"),
    ("llm_tokens_waiting", GAUGE, "Tokens of the prompts of these", "num_waiting_tokens"),
    ("llm_kv_blocks", GAUGE, "Blocks of the KV cache", "num_blocks"),
    ("llm_kv_blocks_held", GAUGE, "Blocks held by running requests", "num_blocks_held"),
    ("llm_steps_total", COUNTER, "Runs of the graph", "num_steps"),
    ("llm_step_seconds_total", COUNTER, "Time in runs of the graph", "step_time_s"),
    ("llm_generated_tokens_total", COUNTER, "Tokens generated", "num_generated_tokens"),
    ("llm_prompt_tokens_total", COUNTER, "Prompt tokens of admitted requests", "num_prompt_tokens"),
    ("llm_cached_prompt_tokens_total", COUNTER, "Prompt tokens found in the prefix cache", "num_cached_tokens"),
    (
        "llm_prompt_tokens_without_state_total",
        COUNTER,
        "Prompt tokens in the prefix cache that could not be used, for lack of a state or window behind them",
        "num_tokens_without_state",
    ),
    ("llm_preemptions_total", COUNTER, "Requests that gave up their blocks", "num_preemptions"),
    ("llm_wasted_tokens_total", COUNTER, "Tokens computed for cancelled requests", "num_wasted_tokens"),
    ("llm_prefill_instances", GAUGE, "Prefill instances that are connected", "num_prefill_instances"),
    ("llm_remote_prefills_total", COUNTER, "Prompts that other instances were asked for", "num_remote_prefills"),
    (
        "llm_remote_prefill_failures_total",
        COUNTER,
        "Of these, prompts that were computed here, at least in part",
        "num_remote_prefill_failures",
    ),
    ("llm_pulled_blocks_total", COUNTER, "Blocks that other instances have sent", "num_pulled_blocks"),
    ("llm_image_embedding_queries_total", COUNTER, "Images of starting requests", "num_image_queries"),
    ("llm_image_embedding_hits_total", COUNTER, "Of these, images with kept embeddings", "num_image_hits"),
    ("llm_images_encoded_total", COUNTER, "Images that the vision tower has encoded", "num_images_encoded"),
    ("llm_image_encoding_seconds_total", COUNTER, "Time in the vision tower", "image_time_s"),
    ("llm_drafted_tokens_total", COUNTER, "Tokens tried ahead of the model", "num_drafted_tokens"),
    ("llm_accepted_tokens_total", COUNTER, "Of these, the model's own", "num_accepted_tokens"),
    ("llm_expert_choices_total", COUNTER, "Experts that tokens have chosen, of all layers", "num_expert_choices"),
    (
        "llm_busiest_expert_choices_total",
        COUNTER,
        "Of these, choices of the busiest expert of each layer",
        "num_busiest_expert_choices",
    ),
    (
        "llm_busiest_rank_choices_total",
        COUNTER,
        "Of these, choices of experts of the busiest rank of each layer",
        "num_busiest_rank_choices",
    ),
)
# family, kind, description, function of the engine's client; only if there are several engines
SINGLE_ENGINE_FAMILIES: tuple[tuple[str, str, str, Callable[[EngineClient], float]], ...] = (
    ("llm_engine_up", GAUGE, "1 if the engine takes requests", lambda engine: engine.is_up),
    ("llm_engine_requests_open", GAUGE, "Open answers of the engine", lambda engine: engine.num_open),
    (
        "llm_engine_kv_blocks_held",
        GAUGE,
        "Blocks held by running requests of the engine",
        lambda engine: engine.stats.get("num_blocks_held", 0),
    ),
)
# family, description, statistic of `DraftCounts`
DRAFT_FAMILIES = (
    ("llm_drafted_tokens_by_position_total", "Tokens tried ahead, by method and position", DRAFTED),
    ("llm_accepted_tokens_by_position_total", "Of these, the model's own", ACCEPTED),
)
# family, kind, description, attribute of OwnerUsage
KEY_FAMILIES = (
    ("llm_key_requests_open", GAUGE, "Requests accepted and not ended, by key", "num_open"),
    ("llm_key_requests_total", COUNTER, "Requests let in, by key", "num_requests"),
    ("llm_key_refused_total", COUNTER, "Requests beyond a key's limits", "num_refused"),
    ("llm_key_prompt_tokens_total", COUNTER, "Tokens of prompts, by key", "num_prompt_tokens"),
    ("llm_key_generated_tokens_total", COUNTER, "Tokens of ended answers, by key", "num_generated_tokens"),
)
# Gauges of FastDeploy, one family with the member as label name and value: member, name of the engine's statistic
FASTDEPLOY_MEMBERS = (("batch_size", "num_running"), ("max_block_num", "num_blocks"))
END_REASONS = ("stop", "length", *KINDS)


def samples(service: Service, max_batch_size: int) -> list[Sample]:
    """Return the current values of all families, with vLLM's names too if VLLM_METRICS is set."""
    own, model_name = list(_samples(service, max_batch_size)), service.vllm_model_name()
    return [*own, *by_vllm_names(own, model_name)] if model_name else own


def _samples(service: Service, max_batch_size: int) -> Iterator[Sample]:
    stats = service.client.stats
    for family, kind, doc, name in ENGINE_FAMILIES:
        yield Sample(family, kind, doc, (), stats.get(name, 0))
    for family, doc, prefix in DRAFT_FAMILIES:
        for name in stats:
            if name.startswith(f"{prefix}/"):
                yield Sample(family, COUNTER, doc, labels_of(name), stats[name])
    yield Sample("llm_requests_open", GAUGE, "Requests accepted and not ended", (), service.num_open)
    yield Sample(
        "llm_engine_restarts_total", COUNTER, "Engine processes after the first", (), service.client.num_restarts
    )
    if len(engines := service.client.engines) > 1:
        for family, kind, doc, value_of in SINGLE_ENGINE_FAMILIES:
            for index, engine in enumerate(engines):
                yield Sample(family, kind, doc, (("engine", str(index)),), float(value_of(engine)))
    latency = service.latency
    with latency.lock:
        for reason in dict.fromkeys((*END_REASONS, *latency.num_ended)):
            yield Sample(
                "llm_requests_ended_total",
                COUNTER,
                "Ended requests by reason",
                (("reason", reason),),
                latency.num_ended.get(reason, 0),
            )
        yield from _histogram("llm_time_to_first_token_seconds", "Request to first token", latency.time_to_first_token)
        yield from _histogram("llm_inter_token_seconds", "From token to token of a request", latency.inter_token)
        yield from _histogram("llm_request_seconds", "Request to end", latency.request)
    yield from _owner_samples(service)
    yield from _fastdeploy_samples(stats, max_batch_size)


def _histogram(family: str, doc: str, histogram: Histogram) -> Iterator[Sample]:
    total = 0
    for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), histogram.counts, strict=True):
        total += count
        yield Sample(family, HISTOGRAM, doc, (("le", bound),), total, "_bucket")
    yield Sample(family, HISTOGRAM, doc, (), histogram.sum_s, "_sum")
    yield Sample(family, HISTOGRAM, doc, (), total, "_count")


def _owner_samples(service: Service) -> Iterator[Sample]:
    """Yield the samples of all named owners, grouped by family as Prometheus requires."""
    rate_limiter = service.rate_limiter.named_owners()
    for family, kind, doc, name in KEY_FAMILIES:
        for owner_usage in rate_limiter:
            yield Sample(family, kind, doc, (("key", owner_usage.name),), getattr(owner_usage, name))


def _fastdeploy_samples(stats: dict[str, float], max_batch_size: int) -> Iterator[Sample]:
    num_blocks, held = stats.get("num_blocks", 0), stats.get("num_blocks_held", 0)
    members = {name: stats.get(counter, 0) for name, counter in FASTDEPLOY_MEMBERS}
    members |= {
        "max_batch_size": max_batch_size,
        "block_num": num_blocks - held,
        "available_resource": (num_blocks - held) / num_blocks if num_blocks else 0.0,
    }
    for name, value in members.items():
        yield Sample("inference_server_metrics", GAUGE, "State of the server", ((name, name),), value)
    # Triton derives its ORCA load headers from the family of this name.
    for kind, value in (("used", held), ("max", num_blocks), ("tokens_per", stats.get("block_size", 0))):
        yield Sample(
            "nv_trt_llm_kv_cache_block_metrics", GAUGE, "KV cache blocks", (("kv_cache_block_type", kind),), value
        )


class MetricsThread:
    """Thread that reports the metrics to Triton's endpoint once a second. `pb_utils` is Triton's Python module."""

    def __init__(self, service: Service, max_batch_size: int, pb_utils: Any):
        self._service, self._max_batch_size, self._pb_utils = service, max_batch_size, pb_utils
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, Any], tuple[Any, float]] = {}  # with the last reported value
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(UPDATE_INTERVAL_S):
            try:
                self.update()
            except Exception:  # Triton may run without metrics
                log.exception("metrics are no longer updated")
                return

    def update(self) -> None:
        """Report all current values."""
        for sample in samples(self._service, self._max_batch_size):
            counter = Sample(sample.family + sample.suffix, COUNTER, *sample[2:])
            self._report(counter if sample.kind == HISTOGRAM else sample)

    def _report(self, sample: Sample) -> None:
        key = (sample.family, sample.labels)
        metric, reported = self._metrics.get(key) or (self._make(sample), 0.0)
        if sample.kind == GAUGE and (sample.value != reported or key not in self._metrics):
            metric.set(sample.value)
        elif sample.kind == COUNTER and sample.value > reported:
            metric.increment(sample.value - reported)
        elif sample.kind == COUNTER and sample.value < reported:  # a restarted engine counts from 0
            metric.increment(sample.value)
        self._metrics[key] = (metric, sample.value)

    def _make(self, sample: Sample) -> Any:
        family = self._families.get(sample.family)
        if family is None:
            kinds = {COUNTER: self._pb_utils.MetricFamily.COUNTER, GAUGE: self._pb_utils.MetricFamily.GAUGE}
            family = self._pb_utils.MetricFamily(name=sample.family, description=sample.doc, kind=kinds[sample.kind])
            self._families[sample.family] = family
        return family.Metric(labels=dict(sample.labels))
