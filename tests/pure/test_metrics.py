"""The metric families and how they are told to Triton."""

from types import SimpleNamespace

import pytest

from engine.serving import metrics
from engine.serving.accounts import Accounts
from engine.serving.latency import BUCKETS_S, Ended, Histogram, Latency
from engine.serving.metrics import MetricsThread, samples
from engine.wire import Owner
from tests.patience import wait_until
from tests.pure import fake_triton


@pytest.fixture
def service():
    stats = {"num_running": 3, "num_waiting": 2, "num_blocks": 8, "num_blocks_held": 6, "block_size": 64}
    stats |= {"num_generated_tokens": 100, "num_preemptions": 1}
    return SimpleNamespace(
        client=SimpleNamespace(stats=stats, num_restarts=1), num_open=5, latency=Latency(), accounts=Accounts()
    )


@pytest.fixture
def thread(service, monkeypatch):
    """It tells when the test says so: `thread.update()`."""
    monkeypatch.setattr(metrics, "UPDATE_INTERVAL_S", 1000)
    thread = MetricsThread(service, 50, fake_triton.as_module())
    yield thread
    thread.close()


def told(family, **labels):
    return fake_triton.MetricFamily.made[family].metrics[tuple(labels.items())].value


def test_the_state_of_the_engine_is_told(thread):
    thread.update()
    assert (told("llm_requests_running"), told("llm_requests_waiting"), told("llm_requests_open")) == (3, 2, 5)
    assert (told("llm_kv_blocks"), told("llm_kv_blocks_held")) == (8, 6)
    assert (told("llm_generated_tokens_total"), told("llm_preemptions_total")) == (100, 1)
    assert told("llm_engine_restarts_total") == 1


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
    assert [told(name, kv_cache_block_type=kind) for kind in ("used", "max", "tokens_per")] == [6, 8, 64]


def test_counters_rise_by_what_is_new_also_after_a_restart_of_the_engine(thread, service):
    expected = 0
    for value, rise in ((100, 100), (130, 30), (130, 0), (7, 7), (10, 3)):
        service.client.stats["num_generated_tokens"] = value
        thread.update()
        expected += rise
        assert told("llm_generated_tokens_total") == expected


def test_gauges_rise_and_fall_and_what_has_not_changed_is_not_told_again(thread, service):
    for value in (3, 0, 0, 4):
        service.client.stats["num_running"] = value
        thread.update()
        assert told("llm_requests_running") == value
    assert fake_triton.MetricFamily.made["llm_requests_running"].metrics[()].calls == 3
    assert fake_triton.MetricFamily.made["llm_kv_blocks"].metrics[()].calls == 1


def test_before_the_engine_answers_everything_is_there_and_zero(service):
    service.client.stats = {}
    values = {(sample.family + sample.suffix, sample.labels): sample.value for sample in samples(service, 50)}
    assert values["llm_requests_running", ()] == 0
    assert values["inference_server_metrics", (("available_resource", "available_resource"),)] == 0
    assert values["llm_requests_ended_total", (("reason", "cancelled"),)] == 0
    assert len(values) == len(list(samples(service, 50))), "a value is told twice"


def test_ends_are_counted_by_their_reason(thread, service):
    for reason in ("stop", "stop", "cancelled", "prompt_too_long"):
        service.latency.ended(Ended(reason, 0.2))
    thread.update()
    assert told("llm_requests_ended_total", reason="stop") == 2
    assert told("llm_requests_ended_total", reason="cancelled") == 1
    assert told("llm_requests_ended_total", reason="prompt_too_long") == 1
    assert told("llm_requests_ended_total", reason="length") == 0
    assert told("llm_request_seconds_count") == 4


def test_what_a_key_has_used_is_told_by_its_name_and_nobodys_is_not(thread, service):
    for name in ("", "alice"):
        account = service.accounts.of(Owner(name))
        account.enter(Owner(name))
        account.charge(7, 0)
        account.charge(0, 3)
    thread.update()
    assert told("llm_key_requests_open", key="alice") == told("llm_key_requests_total", key="alice") == 1
    assert told("llm_key_prompt_tokens_total", key="alice") == 7
    assert told("llm_key_generated_tokens_total", key="alice") == 3
    assert told("llm_key_refused_total", key="alice") == 0
    assert len(fake_triton.MetricFamily.made["llm_key_requests_open"].metrics) == 1


def test_histograms_are_told_as_prometheus_has_them(thread, service):
    for seconds in (0.001, 0.2, 0.25, 1000):
        service.latency.ended(Ended("stop", seconds))
    thread.update()
    assert told("llm_request_seconds_bucket", le="0.001") == 1
    assert told("llm_request_seconds_bucket", le="0.1") == 1
    assert told("llm_request_seconds_bucket", le="0.25") == 3
    assert told("llm_request_seconds_bucket", le="300.0") == 3
    assert told("llm_request_seconds_bucket", le="+Inf") == told("llm_request_seconds_count") == 4
    assert told("llm_request_seconds_sum") == pytest.approx(1000.451)


def test_the_first_token_is_timed_from_the_request_and_the_others_from_their_forerunner():
    latency = Latency()
    latency.tokens(2, 0.4, is_first=True)  # a second token came with the first
    latency.tokens(4, 0.2, is_first=False)
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
