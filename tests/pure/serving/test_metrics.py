"""Tests of the metric families and how they are reported to Triton."""

import itertools
from types import SimpleNamespace

import pytest

from engine.serving import metrics
from engine.serving.latency import BUCKETS_S, Histogram, LatencyStats, RequestRecord
from engine.serving.metrics import MetricsThread, samples
from engine.serving.options import ServiceOptions
from engine.serving.rate_limits import RateLimiter
from engine.settings.config import Config
from engine.settings.served import SERVED_FILE, Served
from engine.wire import Owner
from gateway.metrics import as_text
from tests.patience import wait_until
from tests.pure import fake_triton


@pytest.fixture
def service():
    stats = {"num_running": 3, "num_waiting": 2, "num_blocks": 8, "num_blocks_held": 6, "block_size": 64}
    stats |= {"num_generated_tokens": 100, "num_preemptions": 1}
    return SimpleNamespace(
        client=SimpleNamespace(stats=stats, num_restarts=1, engines=[None]),
        num_open=5,
        latency=LatencyStats(),
        rate_limiter=RateLimiter(),
        vllm_model_name=str,
    )


@pytest.fixture
def thread(service, monkeypatch):
    """Return the thread, which updates when the test calls `thread.update()`."""
    monkeypatch.setattr(metrics, "UPDATE_INTERVAL_S", 1000)
    thread = MetricsThread(service, 50, fake_triton.as_module())
    yield thread
    thread.close()


def value_of(family, **labels):
    return fake_triton.MetricFamily.made[family].metrics[tuple(labels.items())].value


def test_the_state_of_the_engine_is_reported(thread):
    thread.update()
    assert (value_of("llm_requests_running"), value_of("llm_requests_waiting"), value_of("llm_requests_open")) == (
        3,
        2,
        5,
    )
    assert (value_of("llm_kv_blocks"), value_of("llm_kv_blocks_held")) == (8, 6)
    assert (value_of("llm_generated_tokens_total"), value_of("llm_preemptions_total")) == (100, 1)
    assert value_of("llm_engine_restarts_total") == 1


def test_the_predecessors_family_has_its_five_members(thread):
    thread.update()
    members = fake_triton.MetricFamily.made["inference_server_metrics"].metrics
    assert {labels: metric.value for labels, metric in members.items()} == {
        (("batch_size", "batch_size"),): 3,
        (("max_batch_size", "max_batch_size"),): 50,
        (("block_num", "block_num"),): 2,
        (("max_block_num", "max_block_num"),): 8,
        (("available_resource", "available_resource"),): 0.25,
    }


def test_triton_finds_what_it_needs_to_answer_orca(thread):
    thread.update()
    name = "nv_trt_llm_kv_cache_block_metrics"
    assert [value_of(name, kv_cache_block_type=kind) for kind in ("used", "max", "tokens_per")] == [6, 8, 64]


def test_counters_rise_by_what_is_new_also_after_a_restart_of_the_engine(thread, service):
    expected = 0
    for value, rise in ((100, 100), (130, 30), (130, 0), (7, 7), (10, 3)):
        service.client.stats["num_generated_tokens"] = value
        thread.update()
        expected += rise
        assert value_of("llm_generated_tokens_total") == expected


def test_gauges_rise_and_fall_and_unchanged_values_are_not_reported_again(thread, service):
    for value in (3, 0, 0, 4):
        service.client.stats["num_running"] = value
        thread.update()
        assert value_of("llm_requests_running") == value
    assert fake_triton.MetricFamily.made["llm_requests_running"].metrics[()].calls == 3
    assert fake_triton.MetricFamily.made["llm_kv_blocks"].metrics[()].calls == 1


def test_before_the_engine_answers_everything_is_there_and_zero(service):
    service.client.stats = {}
    values = {(sample.family + sample.suffix, sample.labels): sample.value for sample in samples(service, 50)}
    assert values["llm_requests_running", ()] == 0
    assert values["inference_server_metrics", (("available_resource", "available_resource"),)] == 0
    assert values["llm_requests_ended_total", (("reason", "cancelled"),)] == 0
    assert len(values) == len(list(samples(service, 50))), "a value is reported twice"


def test_ends_are_counted_by_their_reason(thread, service):
    for reason in ("stop", "stop", "cancelled", "prompt_too_long"):
        service.latency.record_end(RequestRecord(reason, 0.2))
    thread.update()
    assert value_of("llm_requests_ended_total", reason="stop") == 2
    assert value_of("llm_requests_ended_total", reason="cancelled") == 1
    assert value_of("llm_requests_ended_total", reason="prompt_too_long") == 1
    assert value_of("llm_requests_ended_total", reason="length") == 0
    assert value_of("llm_request_seconds_count") == 4


def test_the_usage_of_an_api_key_is_reported_by_its_name_and_that_of_other_requests_is_not(thread, service):
    for name in ("", "alice"):
        usage = service.rate_limiter.usage_of(Owner(name))
        usage.admit(Owner(name))
        usage.charge(7, 0)
        usage.charge(0, 3)
    thread.update()
    assert value_of("llm_key_requests_open", key="alice") == value_of("llm_key_requests_total", key="alice") == 1
    assert value_of("llm_key_prompt_tokens_total", key="alice") == 7
    assert value_of("llm_key_generated_tokens_total", key="alice") == 3
    assert value_of("llm_key_refused_total", key="alice") == 0
    assert len(fake_triton.MetricFamily.made["llm_key_requests_open"].metrics) == 1


def test_histograms_are_reported_in_prometheus_format(thread, service):
    for seconds in (0.001, 0.2, 0.25, 1000):
        service.latency.record_end(RequestRecord("stop", seconds))
    thread.update()
    assert value_of("llm_request_seconds_bucket", le="0.001") == 1
    assert value_of("llm_request_seconds_bucket", le="0.1") == 1
    assert value_of("llm_request_seconds_bucket", le="0.25") == 3
    assert value_of("llm_request_seconds_bucket", le="300.0") == 3
    assert value_of("llm_request_seconds_bucket", le="+Inf") == value_of("llm_request_seconds_count") == 4
    assert value_of("llm_request_seconds_sum") == pytest.approx(1000.451)


def test_the_first_token_is_timed_from_the_request_and_the_others_from_their_forerunner():
    latency = LatencyStats()
    latency.record_tokens(2, 0.4, is_first=True)  # a second token came with the first
    latency.record_tokens(4, 0.2, is_first=False)
    assert latency.time_to_first_token.sum_s == pytest.approx(0.4)
    assert sum(latency.time_to_first_token.counts) == 1
    assert latency.inter_token.sum_s == pytest.approx(0.2)
    assert sum(latency.inter_token.counts) == 5
    assert latency.inter_token.counts[BUCKETS_S.index(0.05)] == 4


def test_a_clock_that_is_set_back_does_not_make_a_sum_fall():
    histogram = Histogram()
    histogram.observe(-5.0)
    assert (histogram.sum_s, histogram.counts[0]) == (0.0, 1)


def test_the_thread_tells_by_itself_and_survives_a_triton_without_metrics(service, monkeypatch):
    monkeypatch.setattr(metrics, "UPDATE_INTERVAL_S", 0.001)
    thread = MetricsThread(service, 50, fake_triton.as_module())
    wait_until(lambda: "llm_requests_running" in fake_triton.MetricFamily.made)
    thread.close()
    without = SimpleNamespace(MetricFamily=SimpleNamespace(COUNTER=1, GAUGE=2))  # cannot be called
    thread = MetricsThread(service, 50, without)
    wait_until(lambda: not thread._thread.is_alive())
    thread.close()


# --- by vLLM's names ---


def test_metrics_have_vllms_names_if_the_setting_says_so(service):
    assert not [each for each in samples(service, 50) if each.family.startswith("vllm:")]
    service.vllm_model_name = lambda: "org/model"
    for ended in (
        RequestRecord("stop", 0.5),
        RequestRecord("stop", 0.5),
        RequestRecord("cancelled", 2.0),
        RequestRecord("overloaded", 0.0),
    ):
        service.latency.record_end(ended)
    service.latency.record_tokens(3, 0.2, is_first=True)
    text = as_text(samples(service, 50))
    model = 'model_name="org/model"'
    for line in (
        f"vllm:num_requests_running{{{model}}} 3",
        f"vllm:num_requests_waiting{{{model}}} 2",
        f"vllm:kv_cache_usage_perc{{{model}}} 0.75",
        f"vllm:generation_tokens_total{{{model}}} 100",
        f"vllm:num_preemptions_total{{{model}}} 1",
        f'vllm:request_success_total{{{model},finished_reason="stop"}} 2',
        f'vllm:request_success_total{{{model},finished_reason="abort"}} 1',
        f'vllm:time_to_first_token_seconds_bucket{{{model},le="0.25"}} 1',
        f"vllm:inter_token_latency_seconds_count{{{model}}} 2",
        f"vllm:time_per_output_token_seconds_count{{{model}}} 2",
        f"vllm:e2e_request_latency_seconds_sum{{{model}}} 3.0",
        "# TYPE vllm:e2e_request_latency_seconds histogram",
    ):
        assert f"\n{line}\n" in text
    assert "overloaded" not in text.partition("vllm:")[2]
    families = [family for family, _ in itertools.groupby(samples(service, 50), lambda each: each.family)]
    assert len(families) == len(set(families)), "the values of a family must follow each other"


def test_the_name_of_the_model_is_the_one_that_is_served_now(tmp_path):
    config = Config(run_dir=str(tmp_path), served_model_name="first")
    assert ServiceOptions.of(config).vllm_model_name() == ""
    options = ServiceOptions.of(config.changed(vllm_metrics=True))
    assert options.vllm_model_name() == "first"
    (tmp_path / SERVED_FILE).write_text(Served("1", "second").text())
    assert options.vllm_model_name() == "second"
