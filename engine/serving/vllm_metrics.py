"""Metrics of the server under vLLM's names, for dashboards and autoscalers that expect them (VLLM_METRICS)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.serving.metrics import Sample

FAMILIES = {  # our family -> vLLM's families
    "llm_requests_running": ("vllm:num_requests_running",),
    "llm_requests_waiting": ("vllm:num_requests_waiting",),
    "llm_kv_blocks_held": ("vllm:kv_cache_usage_perc",),
    "llm_prompt_tokens_total": ("vllm:prompt_tokens_total", "vllm:prefix_cache_queries_total"),
    "llm_cached_prompt_tokens_total": ("vllm:prefix_cache_hits_total",),
    "llm_generated_tokens_total": ("vllm:generation_tokens_total",),
    "llm_preemptions_total": ("vllm:num_preemptions_total",),
    "llm_requests_ended_total": ("vllm:request_success_total",),
    "llm_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "llm_inter_token_seconds": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "llm_request_seconds": ("vllm:e2e_request_latency_seconds",),
}
FINISHED_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort"}  # our reason -> vLLM's


def by_vllm_names(samples: Iterable[Sample], model_name: str) -> Iterator[Sample]:
    """Yield the samples of vLLM's families that correspond to `samples`, grouped by family."""
    by_family = {family: list(group) for family, group in groupby(samples, lambda sample: sample.family)}
    [num_blocks] = by_family["llm_kv_blocks"]
    for family, names in FAMILIES.items():
        for name in names:
            for sample in by_family[family]:
                value, labels = sample.value, dict(sample.labels)
                if family == "llm_kv_blocks_held":
                    value = value / num_blocks.value if num_blocks.value else 0.0
                if family == "llm_requests_ended_total":
                    if labels["reason"] not in FINISHED_REASONS:
                        continue
                    labels = {"finished_reason": FINISHED_REASONS[labels["reason"]]}
                yield sample._replace(family=name, labels=(("model_name", model_name), *labels.items()), value=value)
