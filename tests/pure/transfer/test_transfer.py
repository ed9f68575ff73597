"""Disaggregation between two engines in one process: equal answers, and computation in place of blocks that fail."""

import contextlib
import socket
import ssl
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.core import remote_prefill
from engine.core.block_pool import BlockPool
from engine.core.cache_groups import FULL_ATTENTION, SLIDING_WINDOW, STATE, CacheGroup
from engine.core.limits import Limits
from engine.core.prefill_jobs import PrefillJob, PrefillJobs, prefill_request
from engine.core.remote_prefill import RemotePrefill
from engine.core.scheduler import Scheduler
from engine.core.types import Request, Sampling, StepOutput
from engine.errors import ConfigError
from engine.settings.config import Config
from engine.settings.tls import server_context
from engine.transfer import client, messages
from engine.transfer.start import start_transfer, tls_of
from tests.patience import wait_until
from tests.pure.transfer_pair import (
    VOCAB_SIZE,
    Link,
    Pair,
    SharedHostMemory,
    a_loop,
    answers_of_one,
    connect,
    random_requests,
    serve,
)

BLOCK_SIZE = 16
CERTIFICATES = Path(__file__).parents[2] / "certificates"
NUM_REQUESTS = 50


def alone(graph_dir, requests):
    """Return the answers of one mixed engine."""
    return answers_of_one(a_loop(graph_dir), requests)


@pytest.fixture(scope="module")
def graph_dir(exported):
    return exported("qwen2", block_size=BLOCK_SIZE)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["qwen2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3_text", "qwen3_next"))]
)  # all kinds of cache groups
def test_answers_are_those_of_one_engine(family, exported):
    check_answers(exported(family, block_size=BLOCK_SIZE))


@pytest.mark.slow
def test_answers_with_an_int8_cache_of_latents_are_those_of_one_engine(exported):
    check_answers(exported("deepseek_v3", block_size=BLOCK_SIZE, int8_cache=True))


def check_answers(graph_dir):
    requests = random_requests(seed=1, count=NUM_REQUESTS)
    pair = Pair.of(graph_dir)
    for index, (prompt, sampling) in enumerate(requests):
        pair.add(str(index), prompt, sampling)
        pair.turn()
    assert pair.run() == alone(graph_dir, requests)
    counters = pair.decode.remote.counters
    assert counters.num_remote_prefills > NUM_REQUESTS / 2
    assert counters.num_remote_prefill_failures == 0
    assert counters.num_pulled_blocks >= counters.num_remote_prefills


@pytest.mark.parametrize(
    "family",
    ["qwen2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3_text", "qwen3_next", "deepseek_v3"))],
)
def test_the_decode_instance_computes_only_the_last_token_of_a_prompt(family, exported):
    """Its first step is then like those of running answers, whatever part of a block the prompt ends with. The second
    time, all blocks are found at the prefill instance, and the third time here."""
    graph_dir, rows = exported(family, block_size=BLOCK_SIZE), []
    lengths = [3 * BLOCK_SIZE + more for more in (-1, 0, 1, 2, 9)] + [9 * BLOCK_SIZE + 1]
    requests = [([(seed + 7 * index) % VOCAB_SIZE for index in range(each)], FEW) for seed, each in enumerate(lengths)]
    pair, expected = Pair.of(graph_dir), alone(graph_dir, requests)
    num_pulled = []
    for decode in (pair.decode, a_loop(graph_dir), None):
        if decode and decode is not pair.decode:
            pair = Pair(pair.prefill, decode, pair.server, connect(decode, pair.server.port))
            wait_until(lambda pair=pair: pair.client.is_ready)
        launch = pair.decode.executor.launch
        pair.decode.executor.launch = lambda batch, launch=launch: rows.extend(batch.rows) or launch(batch)
        for index, (prompt, sampling) in enumerate(requests):
            pair.add(str(index), prompt, sampling)
        assert pair.run() == expected
        num_pulled.append(pair.decode.remote.counters.num_pulled_blocks)
        assert pair.decode.remote.counters.num_remote_prefill_failures == 0
    assert {len(row.token_ids) for row in rows} == {1}
    assert num_pulled[0] == num_pulled[1] == num_pulled[2] > 0


@pytest.mark.parametrize("family", ["qwen2", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_a_prefill_instance_finds_the_beginning_of_a_second_chat(family, exported):
    graph_dir, stop_id = exported(family, block_size=BLOCK_SIZE), 299
    system, sampling = [*range(5 * BLOCK_SIZE + 4), stop_id], replace(FEW, stop_token_ids=(stop_id,))
    pair = Pair.of(graph_dir)
    requests = [(system + [(7 * index + first) % 250 for index in range(70)], sampling) for first in (100, 200)]
    for index, (prompt, _) in enumerate(requests):
        pair.add(str(index), prompt, sampling)
        pair.run()
    assert pair.answers == alone(graph_dir, requests)
    assert pair.decode.remote.counters.num_remote_prefills == 2
    assert pair.prefill.stats()["num_cached_tokens"] == 5 * BLOCK_SIZE


def test_answers_are_those_of_one_engine_when_blocks_are_copied_from_memory_to_memory(graph_dir):
    requests = random_requests(seed=3, count=20)
    pair = Pair.that_shares(graph_dir)
    for index, (prompt, sampling) in enumerate(requests):
        pair.add(str(index), prompt, sampling)
    assert pair.run() == alone(graph_dir, requests)
    counters = pair.decode.remote.counters
    assert counters.num_remote_prefill_failures == 0
    assert pair.decode.executor.blocks().num_copied == counters.num_pulled_blocks > 0


LONG = [index * 7 % VOCAB_SIZE for index in range(500)]
FEW = Sampling(max_new_tokens=4, temperature=0, num_logprobs=1)


@pytest.fixture(scope="module")
def expected(graph_dir):
    return alone(graph_dir, [(LONG, FEW)])["0"]


@pytest.fixture
def link(monkeypatch):
    for name, seconds in {"SILENT_S": 0.3, "LEASE_S": 0.4, "BEAT_S": 0.1}.items():
        monkeypatch.setattr(messages, name, seconds)
    monkeypatch.setattr(client, "RETRY_S", 0.1)
    with contextlib.closing(Link()) as link:
        yield link


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["cut", "freeze"])
def test_a_prompt_is_computed_locally_after_the_link_has_failed_and_pulled_again_when_it_is_back(
    failure, link, graph_dir, expected
):
    pair = Pair.of(graph_dir, link)
    pair.add("first", LONG, FEW)
    while not pair.decode.remote.counters.num_pulled_blocks:
        pair.turn()
    assert pair.prefill.jobs.num_open
    getattr(link, failure)()
    assert pair.run()["first"] == expected
    counters = pair.decode.remote.counters
    assert (counters.num_remote_prefill_failures, pair.outputs["first"].num_cached) == (1, 0)
    link.thaw()
    wait_until(lambda: pair.client.is_ready)
    other = [*LONG[100:], *LONG[:100]]
    pair.add("second", other, FEW)
    assert pair.run()["second"] == alone(graph_dir, [(other, FEW)])["0"]
    assert (counters.num_remote_prefills, counters.num_remote_prefill_failures) == (2, 1)


def test_a_damaged_block_is_not_used(link, graph_dir, expected):
    pair = Pair.of(graph_dir, link)
    link.is_damaging = True
    pair.add("0", LONG, FEW)
    assert pair.run()["0"] == expected
    assert pair.decode.remote.counters.num_remote_prefill_failures == 1


def test_a_block_that_is_overwritten_after_its_lease_has_ended_is_not_used(graph_dir, expected, monkeypatch):
    """The prefill instance ends the lease after it has said where the blocks are, and before they are copied."""
    pair, copy = Pair.that_shares(graph_dir), SharedHostMemory.copy

    def overwrite_and_copy(memory, peer, moves):
        block, _ = moves[-1]
        content = memory.peers[peer].read_block(block)
        memory.peers[peer].write_block(block, content[:-1] + bytes([content[-1] ^ 1]))
        return copy(memory, peer, moves)

    monkeypatch.setattr(SharedHostMemory, "copy", overwrite_and_copy)
    pair.add("0", LONG, FEW)
    assert pair.run()["0"] == expected
    assert pair.decode.remote.counters.num_remote_prefill_failures == 1


@pytest.mark.slow
def test_shared_memory_is_closed_while_the_instance_is_lost(link, graph_dir, expected):
    pair = Pair.that_shares(graph_dir, link)
    memory = pair.decode.executor.blocks()
    assert memory.peers
    link.freeze()
    wait_until(lambda: not memory.peers)
    link.thaw()
    wait_until(lambda: pair.client.is_ready)
    pair.add("0", LONG, FEW)
    assert pair.run()["0"] == expected
    assert pair.decode.remote.counters.num_remote_prefill_failures == 0


def test_blocks_come_over_tcp_if_memory_cannot_be_opened_unless_it_must_be(graph_dir, expected, monkeypatch):
    monkeypatch.setattr(SharedHostMemory, "share", lambda memory: [(1, [(b"unknown", 0)])])
    pair = Pair.that_shares(graph_dir)
    pair.add("0", LONG, FEW)
    assert pair.run()["0"] == expected
    assert pair.decode.remote.counters.num_remote_prefill_failures == 0
    loop = a_loop(graph_dir)
    client = connect(loop, pair.server.port, device=SharedHostMemory(loop.executor.blocks()), needs_device=True)
    [refusal] = client.refusals(within_s=5)
    assert refusal.endswith("KV_TRANSFER is cuda_ipc, but its caches cannot be opened: it is on another planet")


def test_an_instance_that_does_not_compute_is_not_waited_for(graph_dir, expected, monkeypatch):
    monkeypatch.setattr(remote_prefill, "STALL_S", 0.2)
    pair = Pair.of(graph_dir)
    pair.add("0", LONG, FEW)
    while not pair.decode.is_idle:
        pair.turn_decode()
    assert pair.run()["0"] == expected


def test_a_dropped_request_releases_its_blocks_on_both_sides(graph_dir):
    pair = Pair.of(graph_dir)
    pair.add("0", LONG, FEW)
    while not pair.decode.remote.counters.num_pulled_blocks:
        pair.turn()
    pair.decode.drop("0")
    pair.run()
    counters = pair.decode.remote.counters
    assert (counters.num_remote_prefills, counters.num_remote_prefill_failures) == (1, 0)
    assert [each.scheduler.pool.num_held for each in (pair.prefill, pair.decode)] == [0, 0]


def test_short_prompts_and_prompts_that_are_cached_stay_local(graph_dir, expected):
    pair = Pair.of(graph_dir)
    pair.add("short", LONG[:31], FEW)
    pair.run()
    assert pair.decode.remote.counters.num_remote_prefills == 0
    for name in ("first", "second"):
        pair.add(name, LONG, FEW)
        assert pair.run()[name] == expected
    assert pair.decode.remote.counters.num_remote_prefills == 1
    assert [pair.outputs[name].num_cached for name in ("first", "second")] == [16, 499]


@pytest.mark.slow
def test_all_requests_end_when_blocks_are_scarce(graph_dir):
    pair, requests = Pair.of(graph_dir, num_blocks=20), random_requests(seed=2, count=20)
    for index, (prompt, sampling) in enumerate(requests):
        pair.add(str(index), prompt, sampling)
    assert pair.run() == alone(graph_dir, requests)


def test_instances_with_another_model_or_other_keys_are_refused(graph_dir):
    server = serve(a_loop(graph_dir))
    loop = a_loop(graph_dir)
    other = connect(loop, server.port, identity={"model": "other"})
    [refusal] = other.refusals(within_s=5)
    expected = f"the prefill instance 127.0.0.1:{server.port} cannot be used: model of the prefill instance is tiny"
    assert refusal == expected + ", that of the decode instance is other"
    [refusal] = connect(loop, server.port, token="guess").refusals(within_s=5)
    assert refusal.endswith("API_KEY and API_KEYS of the prefill instance and the decode instance differ")
    assert not other.is_ready


def test_a_decode_instance_that_has_served_starts_again_when_it_is_refused(graph_dir, expected):
    port = serve(a_loop(graph_dir)).port
    settings = {"splitwise_role": "decode", "prefill_instances": f"127.0.0.1:{port}", "graph_dir": str(graph_dir)}
    loop = a_loop(graph_dir)
    with pytest.raises(ConfigError, match=f"the prefill instance 127.0.0.1:{port} cannot be used: API_KEY and API"):
        start_transfer(loop, Config(**settings), lambda: None)
    start_transfer(loop, Config(**settings, engine_is_back=True), lambda: None)
    assert answers_of_one(loop, [(LONG, FEW)])["0"] == expected
    assert loop.remote.counters.num_remote_prefills == 0


def test_blocks_are_pulled_through_tls(graph_dir, expected):
    files = {"tls_cert_file": str(CERTIFICATES / "server.pem"), "tls_key_file": str(CERTIFICATES / "server.key")}
    config, prefill, decode = Config(**files), a_loop(graph_dir), a_loop(graph_dir)
    server = serve(prefill, server_context(config))
    pair = Pair(prefill, decode, server, connect(decode, server.port, tls=lambda host: tls_of(config, host)))
    wait_until(lambda: pair.client.is_ready)
    pair.add("0", LONG, FEW)
    assert pair.run()["0"] == expected
    assert decode.remote.counters.num_pulled_blocks == -(-len(LONG) // BLOCK_SIZE)


def test_a_port_of_another_server_is_refused(graph_dir):
    """Otherwise the decode instance would compute all prompts, which an operator might not notice."""
    loop = a_loop(graph_dir)

    def refuse(of_http):
        with of_http.accept()[0] as accepted:
            accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n")

    with socket.create_server(("127.0.0.1", 0)) as of_http:
        thread = threading.Thread(target=refuse, args=[of_http])
        thread.start()
        [refusal] = connect(loop, of_http.getsockname()[1]).refusals(within_s=5)
        thread.join()
    assert " cannot be used: no prefill instance listens there, on its ENGINE_WORKER_QUEUE_PORT; TLS_CERT" in refusal


def test_tls_of_one_side_only_and_unknown_certificates_are_named(graph_dir, caplog):
    files = {"tls_cert_file": str(CERTIFICATES / "server.pem"), "tls_key_file": str(CERTIFICATES / "server.key")}
    config, loop = Config(**files), a_loop(graph_dir)
    with_tls, without = serve(a_loop(graph_dir), server_context(config)), serve(a_loop(graph_dir))
    connect(loop, with_tls.port)
    wait_until(lambda: "closed the connection without an answer; TLS_CERT_FILE, which is not set here" in caplog.text)
    connect(loop, without.port, tls=lambda host: tls_of(config, host))
    wait_until(lambda: "closed the connection without an answer; TLS_CERT_FILE, which is set here" in caplog.text)
    [refusal] = connect(loop, with_tls.port, tls=lambda host: ssl.create_default_context()).refusals(within_s=5)
    assert " cannot be used: its certificate is not accepted: unable to get local issuer certificate" in refusal


def test_equal_prompts_share_the_pulled_blocks_and_write_the_last_one_apart(graph_dir):
    sampled = [Sampling(max_new_tokens=20, temperature=1.0, seed=seed, num_logprobs=1) for seed in range(6)]
    pair, requests = Pair.of(graph_dir), [(LONG[:105], sampling) for sampling in sampled]
    for index, (prompt, sampling) in enumerate(requests):
        pair.add(str(index), prompt, sampling)
    answers = pair.run()
    assert answers == alone(graph_dir, requests)
    assert len({tuple(token for token, _ in answer) for answer in answers.values()}) == 6


def a_scheduler(num_blocks=20, **limits):
    return Scheduler(BlockPool(num_blocks, BLOCK_SIZE), Limits(**{"max_batch": 4, "max_batched_tokens": 64} | limits))


def decode_side(begun, **settings):
    """Return a scheduler and a RemotePrefill that appends its pulls to `begun`."""
    source = SimpleNamespace(
        is_ready=True, begin=lambda pull: begun.append(pull) or True, end=lambda pull: None, wait=lambda timeout_s: None
    )
    scheduler = a_scheduler(**settings)
    return scheduler, RemotePrefill(scheduler, source, min_tokens=32)


def test_a_pull_begins_when_the_steps_that_may_still_write_its_blocks_have_ended():
    """A step that was launched ahead computes a token too many for a request whose blocks are free again."""
    begun = []
    scheduler, remote = decode_side(begun)
    scheduler.add(Request("short", [1], 1, Sampling(max_new_tokens=5)))
    for _ in range(2):
        assert scheduler.next_batch()
    long = Request("long", LONG[:100], 100, FEW)
    scheduler.add(long)
    remote.consider(long)
    for _ in range(2):
        remote.poll()
        assert not begun
        scheduler.apply(StepOutput([[5]], [None]))
    remote.poll()
    assert [pull.request for pull in begun] == [long]


def test_no_blocks_are_reserved_while_a_copy_waits_for_the_next_step():
    """The last block of the first prompt is available as soon as the request has another one for a copy of it. The
    request cannot be launched yet, because its grammar is not ready."""
    begun = []
    scheduler, remote = decode_side(begun)
    first = Request("first", LONG[:100], 100, FEW, grammar=SimpleNamespace(is_ready=False))
    second = Request("second", LONG[100:200], 100, FEW)
    scheduler.add(first)
    remote.consider(first)
    remote.poll()
    [pull] = begun
    pull.arrived += range(len(pull.keys))
    pull.has_ended = True
    remote.poll()
    assert scheduler.next_batch() is None
    scheduler.add(second)
    remote.consider(second)
    remote.poll()
    assert len(begun) == 1
    first.grammar = None
    [copy] = scheduler.next_batch().copies
    assert copy.source == pull.block_ids[6]
    remote.poll()
    assert len(begun) == 1
    scheduler.apply(StepOutput([[5]], [None]))
    remote.poll()
    assert len(begun) == 2


CACHE_GROUPS = {
    "paged": FULL_ATTENTION,
    "windows": (CacheGroup(SLIDING_WINDOW, 40), CacheGroup(SLIDING_WINDOW, 40), CacheGroup()),
    "states": (CacheGroup(), CacheGroup(STATE, num_parts=3)),
}


@pytest.mark.parametrize("block_ratio", [0.75, 1.0])
@pytest.mark.parametrize("kind", CACHE_GROUPS)
def test_pulled_blocks_are_there_when_the_request_is_admitted_although_it_waits_for_a_slot(kind, block_ratio):
    """There is memory for a few of the prompts only. The blocks of each one are pulled while others run and wait."""
    groups, begun, rows = CACHE_GROUPS[kind], [], []
    scheduler, remote = decode_side(begun, num_blocks=70, cache_groups=groups, block_ratio=block_ratio)
    for index in range(17):
        request = Request(str(index), LONG[index : index + 100], 100, Sampling(max_new_tokens=9))
        scheduler.add(request)
        remote.consider(request)
    num_steps, max_pulled = 0, 0
    while not scheduler.is_idle or remote.num_open:
        num_steps += 1
        assert num_steps < 300
        while begun:
            pull = begun.pop()
            pull.arrived += range(len(pull.keys))
            pull.has_ended = True
        remote.poll()
        max_pulled = max(max_pulled, sum(not request.awaits_blocks for request in scheduler.waiting))
        if batch := scheduler.next_batch():
            rows += [len(row.token_ids) for row in batch.rows]
            scheduler.apply(StepOutput([[5]] * len(batch.rows), [None] * len(batch.rows)))
    scheduler.check()
    assert remote.counters.num_remote_prefills == 17
    assert set(rows) == {1}
    assert len(rows) == 17 * 9
    assert max_pulled > 1


def test_no_request_is_preempted_while_blocks_are_held_for_one_that_waits_for_a_slot():
    begun = []
    scheduler, remote = decode_side(begun, max_batch=1)
    scheduler.add(Request("long", [1], 1, Sampling(max_new_tokens=200)))
    waiting = Request("waiting", LONG[:180], 180, FEW)
    scheduler.add(waiting)
    remote.consider(waiting)
    while not scheduler.is_idle or remote.num_open:
        remote.poll()
        for pull in begun:
            pull.arrived += range(len(pull.keys))
            pull.has_ended = True
        begun.clear()
        if batch := scheduler.next_batch():
            scheduler.apply(StepOutput([[5] for row in batch.rows if row.num_sampled], [None]))
    scheduler.check()
    assert waiting.num_pulled == 179
    assert scheduler.counters.num_preemptions == 0


def test_blocks_are_announced_when_the_step_that_writes_them_has_ended():
    """The second chunk is launched ahead of the end of the first, and its blocks can be found from then on."""
    ready, scheduler, computed = [], a_scheduler(), []
    listener = SimpleNamespace(ready=lambda job, indices: ready.append(list(indices)))
    jobs = PrefillJobs(scheduler, on_first_prompt=lambda: computed.append(jobs.num_computed))
    request = prefill_request("long", LONG[:129], "", ("", 0))
    jobs.begin(PrefillJob("long", request, scheduler.longest_prefix(request)[0], listener))
    jobs.poll()
    for _ in range(2):
        assert scheduler.next_batch()
    jobs.take(scheduler.apply(StepOutput([], [])))
    assert request.cache.num_published == 8
    assert not ready
    assert not computed
    jobs.take(scheduler.apply(StepOutput([], [])))
    assert ready == [list(range(8))]
    scheduler.next_batch()
    jobs.take(scheduler.apply(StepOutput([], [])))
    assert computed == [1]


def test_a_request_that_is_alone_runs_if_there_is_no_block_for_a_copy_of_its_last_one():
    begun = []
    scheduler, remote = decode_side(begun)
    pool = scheduler.pool
    held = pool.take(pool.num_available - 7)
    request = Request("long", LONG[:100], 100, FEW)
    scheduler.add(request)
    remote.consider(request)
    remote.poll()
    [pull] = begun
    pull.arrived += range(len(pull.keys))
    pull.has_ended = True
    remote.poll()
    assert request.num_pulled == 99
    assert scheduler.next_batch() is None  # its blocks are held
    remote.poll()
    [row] = scheduler.next_batch().rows
    assert (row.start, len(row.token_ids)) == (6 * BLOCK_SIZE, 4)
    scheduler.drop("long")
    scheduler.apply(StepOutput([[5]], [None]))
    pool.give_back(held)
    scheduler.check()


def test_a_block_that_has_arrived_is_found_when_another_with_its_key_was_evicted_meanwhile():
    begun = []
    scheduler, remote = decode_side(begun)
    request, pool = Request("long", LONG[:100], 100, FEW), scheduler.pool
    scheduler.add(request)
    remote.consider(request)
    remote.poll()
    [pull] = begun
    other = pool.take(1)  # of a request with the same first tokens
    pool.publish(*other, pull.keys[0])
    pull.arrived += range(len(pull.keys))
    remote.poll()
    pool.give_back(other)
    pool.give_back(pool.take(pool.num_available))
    assert pull.keys[0] not in pool
    pull.has_ended = True
    remote.poll()
    assert (remote.counters.num_remote_prefills, remote.counters.num_remote_prefill_failures) == (1, 0)
    assert request.num_pulled == 99
