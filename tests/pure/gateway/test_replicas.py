"""Replicas: placement by cached prefixes and load, and answers that continue at another replica."""

import asyncio
import contextlib
import random
from functools import partial
from pathlib import Path

import grpc
import msgspec
import pytest

from engine.errors import EngineUnavailable, InvalidRequest, Overloaded
from engine.placement import KnownPrefixes
from engine.settings.config import Config
from engine.settings.tls import key_and_chain
from engine.wire import STORE, Delta, Final, ModelState, Owner, Usage, owner_of, with_owner, write_answer, write_shared
from gateway.backend import ModelLost, ModelUnreachable
from gateway.metrics import as_text
from gateway.replicas import backend as replicated
from gateway.replicas.backend import ReplicatedBackend, with_seed
from gateway.replicas.connections import ReplicaConnections, replica_credentials
from gateway.replicas.placement import choose, num_uncached_tokens, prompt_keys
from gateway.replicas.replica import Replica
from gateway.replicas.replica_set import RemoteReplica, ReplicaSet
from gateway.replicas.served import Load, Poll, ServedRequests
from gateway.triton_client import TritonBackend
from tests.patience import PATIENCE_S
from tests.pure import inference_fake
from tests.pure.gateway_fake import WAIT, FakeBackend
from tests.pure.inference_fake import NEVER, FakeTriton, a_client, a_request, answers, run, serving
from tests.pure.inference_fake import text_of as text_of_response

ASK = {"req_id": "r", "text": "Hi"}


class Simulated:
    """A replica for placement: its load is set by the test."""

    def __init__(self, name):
        self.identity = name.encode()
        self.known = KnownPrefixes()
        self.num_running = self.num_queued_tokens = 0


def chat(system, *turns):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return prompt_keys({"messages": [{"role": "system", "content": system}, *messages]})


# --- placement --------------------------------------------------------------------------------------------------------


def test_turns_of_a_conversation_have_one_session_and_chats_with_one_system_prompt_one_prefix():
    first, second, other = chat("S" * 900, "a"), chat("S" * 900, "a", "b" * 600, "c"), chat("S" * 900, "z")
    assert first.session == second.session != other.session
    assert first.prefix == second.prefix == other.prefix
    assert second.chain[: len(first.chain)] == first.chain and len(second.chain) > len(first.chain)
    salted = prompt_keys({"text": "a" * 2000, "cache_salt": "s"})
    assert not set(salted.chain) & set(prompt_keys({"text": "a" * 2000}).chain)


def test_an_image_counts_like_its_tokens_and_not_like_its_file():
    def keys(*images, text="x" * 600):
        parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{each}"}} for each in images]
        return prompt_keys({"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]})

    cat, dog = "cat" * 100_000, "cat" * 99_999 + "dog"
    assert len(keys(cat).chain) * 256 < keys(cat).num_chars < 6000
    assert keys(cat).chain[:16] == keys(cat, text="y" * 600).chain[:16] != keys(dog).chain[:16]
    assert keys(cat).session != keys(dog).session


def test_a_request_goes_to_the_replica_that_has_its_prefix_unless_that_is_too_busy():
    replicas = [Simulated(name) for name in "abc"]
    keys = chat("S" * 8000, "question")
    replicas[1].known.add(keys.chain)
    assert choose(keys, replicas) is replicas[1]
    replicas[1].num_running = 1000
    assert choose(keys, replicas) is not replicas[1]
    replicas[1].num_running, replicas[1].num_queued_tokens = 0, 100_000
    assert choose(keys, replicas) is not replicas[1]
    assert choose(keys, []) is None
    short = prompt_keys({"text": "Hi"})  # nothing of it can be cached
    assert [choose(short, order) for order in (replicas, replicas[::-1])] == [replicas[0], replicas[2]]


def test_a_request_stays_where_it_was_asked_unless_another_replica_knows_more_of_it_or_has_clearly_less_to_do():
    here, *others = [Simulated(name) for name in "abc"]
    keys = chat("S" * 8000, "question")
    for each in (here, *others):
        each.num_running = 3
    prompts = [chat(f"System {i} " * 200, "question") for i in range(20)]
    assert {choose(each, [here, *others], here) for each in prompts} == {here}
    assert len({choose(each, [here, *others]).identity for each in prompts}) == 3  # of a front end without a model
    here.num_running = 7  # twice the cost
    assert choose(keys, [here, *others], here) is here
    here.num_running = 8
    assert choose(keys, [here, *others], here) in others
    here.num_running = 3
    others[1].known.add(keys.chain[:1])
    assert choose(keys, [here, *others], here) is others[1]
    assert choose(keys, others, here) is others[1]  # it is not ready
    many = [Simulated(f"replica {i}") for i in range(30)]
    placed = [choose(each, many) for each in prompts]
    assert sum(choose(each, many, many[0]) is many[0] for each in prompts) < len(prompts)  # candidates are the same
    assert all(choose(each, many, each_best) is each_best for each, each_best in zip(prompts, placed, strict=True))


def test_a_few_waiting_tokens_move_no_request_with_a_short_prompt():
    here, other = Simulated("a"), Simulated("b")
    here.num_running, other.num_running, here.num_queued_tokens = 5, 4, 20
    short = prompt_keys({"text": "How are you?"})
    assert choose(short, [here, other], here) is here
    here.num_queued_tokens = 200
    assert choose(short, [here, other], here) is other


def test_all_front_ends_have_the_same_candidates_and_a_lost_replica_moves_its_own_requests_only():
    replicas = [Simulated(f"replica {i}") for i in range(30)]
    prompts = [chat(f"System {i % 40} " * 40, f"user {i}") for i in range(200)]
    placed = [choose(keys, replicas) for keys in prompts]
    assert [choose(keys, replicas[::-1]) for keys in prompts] == placed
    moved = [choose(keys, replicas[1:]) for keys in prompts]
    assert [a for a, b in zip(placed, moved, strict=True) if a is not b] == [r for r in placed if r is replicas[0]]


def test_prefixes_are_found_again_and_load_is_spread():
    rng, replicas = random.Random(1), [Simulated(name) for name in "abc"]
    systems = [chr(ord("a") + i) * rng.randint(500, 16000) for i in range(60)]
    placed, num_cached, num_best, single = [], 0, 0, KnownPrefixes()  # of a single server with all requests
    for i in range(1500):
        system = systems[min(int(rng.paretovariate(0.6)), len(systems)) - 1]  # a few are used most of the time
        keys = chat(system, f"{i}" * rng.randint(20, 800))
        replica = choose(keys, replicas)
        num_cached += keys.num_chars // 4 - num_uncached_tokens(keys, replica.known)
        num_best += keys.num_chars // 4 - num_uncached_tokens(keys, single)
        single.add(keys.chain)
        replica.known.add(keys.chain)
        placed.append(replica)
        for each in replicas:
            each.num_running = placed[-24:].count(each)
    assert num_cached >= 0.95 * num_best
    assert max(map(placed.count, replicas)) <= 1.25 * len(placed) / 3


def test_news_are_the_keys_since_the_last_poll_or_all_of_them():
    served = ServedRequests()
    served.note({"req_id": "a", "text": "x" * 1024, "_owner": {"name": "alice"}})
    first = served.summary(Poll(), None, "no")
    assert first.is_all and len(first.keys) == first.num_keys == 4 and not first.has_request
    served.note({"req_id": "b", "text": "x" * 1280})
    second = served.summary(Poll(first.identity, first.num_keys, ("alice", "a")), None, "")
    assert not second.is_all and len(second.keys) == 1 and second.has_request
    assert served.summary(Poll(b"another", 3), None, "").is_all
    assert not served.summary(Poll(find=("", "a")), None, "").has_request  # of another owner


# --- failover ---------------------------------------------------------------------------------------------------------


def test_the_load_of_a_replica_is_that_of_the_other_front_ends_at_the_last_poll_and_the_own_one_now():
    async def scenario():
        worker = ReplicaSet(FakeBackend("a", WAIT, state=ModelState(ready=True, model_hash="m", num_open=6)), Config())
        served, asked = worker.served, {"req_id": "r", "text": "x" * 1024}
        with served.forwarded(asked, "front a") as begun, served.forwarded({**asked, "req_id": "s"}, "front b"):
            begun.num_tokens = 0
            seen = {
                name: (await worker.summary(Poll(front_end=name))).load for name in ("front a", "front b", "front c")
            }
            # The model has six requests, so four are background responses, which no front end waits for.
            assert seen == {"front a": Load(5, 1), "front b": Load(5, 0), "front c": Load(6, 1)}
        replica = Replica("b", lambda: FakeBackend("a", WAIT))
        replica.load_elsewhere, keys = seen["front a"], prompt_keys(asked)
        answers = replica.generate(asked, keys, 5)
        assert (await anext(answers)).token == "a"
        assert (replica.num_running, replica.num_queued_tokens) == (6, 1)
        await answers.aclose()
        assert replica.num_running == 5

    run(scenario())


def test_a_prompt_for_this_server_is_queued_here_with_all_its_tokens_until_it_is_answered():
    async def scenario():
        replicas = set_of((WAIT, "a"), ())
        busy(replicas, 1)
        answers = asyncio.create_task(answer_of(replicas, LONG_ASK))
        await asyncio.to_thread(replicas.local.backend.waiting.acquire, timeout=PATIENCE_S)
        assert replicas.local.num_queued_tokens == num_uncached_tokens(prompt_keys(LONG_ASK), KnownPrefixes()) > 1000
        answers.cancel()

    run(scenario())


class FakeReplicas(ReplicaSet):
    """Replicas over fake backends, the first of which is this server."""

    def __init__(self, *backends, models=()):
        super().__init__(backends[0], Config())
        self.fakes = [
            Replica(f"replica {i}", lambda backend=backend: backend) for i, backend in enumerate(backends[1:])
        ]
        for i, each in enumerate((self.local, *self.fakes)):
            each.identity, each.state = bytes([i]), ModelState(ready=True, model_hash=dict(models).get(i, "m"))

    @property
    def others(self):
        return self.fakes

    async def find(self, owner, req_id):
        return next((each for each in self.fakes if req_id in each.backend.sent_texts), None)


def set_of(*scripts, **more):
    return FakeReplicas(*[FakeBackend(*script) for script in scripts], **more)


async def answer_of(replicas, body=ASK):
    return [each async for each in ReplicatedBackend(replicas).generate(body, 5)]


def busy(replicas, *indices):
    """Let the replicas of these indices be chosen last."""
    for i in indices:
        (replicas.local, *replicas.others)[i].load_elsewhere = Load(1000)


def text_of(answers):
    return "".join(each.token for each in answers)


def test_an_answer_continues_at_the_next_replica_with_its_tokens_and_its_seed():
    async def scenario():
        replicas = set_of(("a", "b", ModelLost("gone")), ("c", "d"))
        busy(replicas, 1)
        answers = await answer_of(replicas)
        assert text_of(answers) == "abcd" and isinstance(answers[-1], Final)
        assert {each.usage.cached_tokens for each in answers} == {4}  # as the first replica has found them
        [first], [rest] = replicas.local.backend.bodies, replicas.fakes[0].backend.bodies
        assert first == with_seed(ASK)
        assert rest == {**first, "resume_from": [2], "answer_ids": [[0, 1]]}
        assert not replicas.local.is_ready

    run(scenario())


def test_the_metrics_count_what_each_replica_got_and_lost():
    async def scenario():
        replicas = set_of(("ab", ModelLost("gone")), ("c",))
        busy(replicas, 1)
        await answer_of(replicas)
        page = as_text((await ReplicatedBackend(replicas).probe(with_metrics=True)).metrics)
        assert [line for line in page.splitlines() if not line.startswith("#")] == [
            'llm_replica_ready{replica="local"} 0',
            'llm_replica_ready{replica="replica 0"} 1',
            'llm_replica_requests_total{replica="local"} 1',
            'llm_replica_requests_total{replica="replica 0"} 1',
            'llm_replica_lost_requests_total{replica="local"} 1',
            'llm_replica_lost_requests_total{replica="replica 0"} 0',
            'llm_replica_inexact_requests_total{replica="local"} 0',
            'llm_replica_inexact_requests_total{replica="replica 0"} 0',
        ]
        assert not (await ReplicatedBackend(replicas).probe()).metrics

    run(scenario())


def sharing(replicas):
    """Let all replicas offer their cached blocks to each other."""
    for i, each in enumerate((replicas.local, *replicas.others)):
        each.host, each.state = f"host{i}", msgspec.structs.replace(each.state, cache_port=7)


LONG_ASK = {"req_id": "r", "text": "word " * 1000}


def test_a_replica_hears_who_knows_more_of_a_prompt_and_nothing_from_another_model_or_without_a_port():
    async def scenario():
        def source_of(replica, stopped=None):
            keys = prompt_keys(LONG_ASK)
            return owner_of(replicas.with_source(LONG_ASK, keys, replica, stopped)).cached_at

        replicas = set_of((), (), (), (), models=[(3, "other")])
        chain, [a, b, other] = prompt_keys(LONG_ASK).chain, replicas.fakes
        other.known.add(chain)
        a.known.add(chain[:2])
        assert source_of(b) == ""
        sharing(replicas)
        assert (source_of(b), source_of(a), source_of(a, stopped=b)) == ("host1:7", "", "host2:7")
        b.known.add(chain[:2])
        assert source_of(b) == ""  # it knows as much
        replicas.local.known.add(chain)
        assert source_of(b) == "host0:7"
        b.state = msgspec.structs.replace(b.state, cache_port=0)
        assert source_of(b) == ""

    run(scenario())


def test_a_client_cannot_name_the_source_of_blocks():
    assert owner_of(with_owner({**ASK, "_owner": {"cached_at": "evil:1"}}, Owner())).cached_at == ""


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_server_that_is_being_stopped_hands_its_requests_over_if_another_one_can_continue(is_alone):
    async def scenario():
        replicas = set_of(("a", "b", WAIT, "c"), ("d",), models=[(1, "other" if is_alone else "m")])
        sharing(replicas)
        busy(replicas, 1)
        local, found = replicas.local, []
        async for each in ReplicatedBackend(replicas).generate(ASK, 5):
            found.append(each)
            if len(found) == 2:
                local.state = msgspec.structs.replace(local.state, ready=False, is_stopping=True)
                replicas.hand_over()
                if is_alone:
                    assert not replicas.fakes[0].backend.bodies
                    return
        assert text_of(found) == "abd"
        [rest] = replicas.fakes[0].backend.bodies
        assert rest["answer_ids"] == [[0, 1]]
        assert owner_of(rest).cached_at == "host0:7"
        assert local.num_lost == 0

    run(scenario())


@pytest.mark.parametrize(
    "field", [{"lora_name": "a"}, {"use_beam_search": True}, {"best_of": 3}, {STORE: {"about": {}}}]
)
def test_a_request_that_might_not_continue_elsewhere_ends_where_it_is(field):
    async def scenario():
        replicas = set_of(("a", "b"), ("never",))
        sharing(replicas)
        busy(replicas, 1)
        found = []
        async for each in ReplicatedBackend(replicas).generate({**ASK, **field}, 5):
            found.append(each)
            replicas.local.state = msgspec.structs.replace(replicas.local.state, ready=False, is_stopping=True)
            replicas.hand_over()
        assert text_of(found) == "ab"
        assert not replicas.fakes[0].backend.bodies

    run(scenario())


def test_a_silent_replica_is_left_and_its_request_ends_there():
    async def scenario():
        replicas = set_of(("a", WAIT, "never"), ("b",))
        busy(replicas, 1)
        backend = replicas.local.backend
        answers = asyncio.create_task(answer_of(replicas))
        assert await asyncio.to_thread(backend.waiting.acquire, timeout=PATIENCE_S)
        replicas.local.lose("no answer for 2 s")
        assert text_of(await answers) == "ab"
        assert backend.cancelled.acquire(timeout=PATIENCE_S)

    run(scenario())


def test_an_answer_never_has_tokens_of_two_models(monkeypatch):
    monkeypatch.setattr(replicated, "CHECK_EVERY_S", 0.01)

    async def scenario():
        replicas = set_of(("a", ModelLost("gone")), ("x",), ("b",), models={1: "another"})
        busy(replicas, 2)
        assert text_of(await answer_of(replicas)) == "ab"
        assert replicas.fakes[0].backend.bodies == []
        alone = set_of(("a", ModelLost("gone")), ("x",), models={1: "another"})
        with pytest.raises(EngineUnavailable, match="gone"):
            await asyncio.wait_for(anext_all(ReplicatedBackend(alone).generate(ASK, 0.1)), 5)
        assert alone.fakes[0].backend.bodies == []

    async def anext_all(answers):
        return [each async for each in answers]

    run(scenario())


def test_an_answer_continues_where_the_arithmetic_is_the_same_if_it_can_and_otherwise_is_counted():
    async def scenario():
        replicas = set_of(("a", ModelLost("gone")), ("x",), ("b", ModelLost("gone")))
        for replica, found in zip((replicas.local, *replicas.fakes), (7, 8, 7), strict=True):
            replica.state = msgspec.structs.replace(replica.state, fingerprint=found)
        busy(replicas, 1, 2)
        replicas.fakes[1].load_elsewhere = Load(10_000)
        assert text_of(await answer_of(replicas)) == "abx"
        assert [each.num_requests for each in (replicas.local, *replicas.fakes)] == [1, 1, 1]
        assert [each.num_inexact for each in (replicas.local, *replicas.fakes)] == [0, 1, 0]
        assert replicas.fakes[0].backend.bodies[0]["answer_ids"] == [[0, 0]]
        assert text_of(await answer_of(replicas)) == "x"  # a new request may begin anywhere
        assert replicas.fakes[0].num_inexact == 1

    run(scenario())


def test_a_replica_hears_what_an_owner_uses_at_the_others_and_the_priority_and_the_name_stay():
    alice = {"name": "alice", "max_requests": 4, "tokens_per_minute": 100, "priority": -3, "cached_at": ""}

    async def scenario():
        replicas = set_of(("a", ModelLost("gone")), ("b",), ("x",))
        for replica, usage in zip((replicas.local, *replicas.fakes), ((1, 5.0), (2, 7.0), (0, 3.5)), strict=True):
            replica.state = msgspec.structs.replace(replica.state, usage={"alice": usage, "bob": (9, 9.0)})
        busy(replicas, 1)
        busy(replicas, 2)
        replicas.fakes[1].load_elsewhere = Load(10_000)
        body = {**ASK, "priority": 7, "_owner": alice}
        assert text_of(await answer_of(replicas, body)) == "ab"
        [first], [rest] = replicas.local.backend.bodies, replicas.fakes[0].backend.bodies
        assert first["_owner"] == {**alice, "num_open_elsewhere": 2, "num_tokens_elsewhere": 10.5}
        assert owner_of(rest) == Owner("alice", None, None, -3)  # what has been admitted must not end at a limit
        assert first["priority"] == rest["priority"] == 7
        free = {**ASK, "_owner": {**alice, "max_requests": None, "tokens_per_minute": None}}
        await answer_of(replicas, free)
        assert replicas.fakes[0].backend.bodies[1]["_owner"] == free["_owner"]

    run(scenario())


def test_requests_of_an_owner_that_were_sent_since_the_last_poll_count():
    async def scenario():
        replicas = set_of(("a", WAIT, "b"), ("x",))
        busy(replicas, 1)
        body = {**ASK, "_owner": {"name": "alice", "max_requests": 1}}
        answers = asyncio.create_task(answer_of(replicas, body))
        await asyncio.to_thread(replicas.local.backend.waiting.acquire, timeout=60)
        [other] = replicas.fakes
        assert owner_of(replicas.with_usage(body, other)).num_open_elsewhere == 1
        assert owner_of(replicas.with_usage(body, replicas.local)).num_open_elsewhere == 0
        replicas.local.lose("no answer for 2 s")
        await answers
        assert owner_of(replicas.with_usage(body, other)).num_open_elsewhere == 0

    run(scenario())


def test_a_refusal_by_the_limit_of_an_owner_is_not_sent_to_another_replica():
    async def scenario():
        refusal = Overloaded("used up")
        refusal.retry_after_s = 3
        replicas = set_of((refusal,), ("x",))
        busy(replicas, 1)
        with pytest.raises(Overloaded, match="used up"):
            await answer_of(replicas)
        assert replicas.fakes[0].backend.bodies == []

    run(scenario())


def test_a_full_replica_is_skipped_and_if_all_are_full_the_client_learns_it():
    async def scenario():
        replicas = set_of((Overloaded("full"),), ("a",))
        busy(replicas, 1)
        assert text_of(await answer_of(replicas)) == "a"
        with pytest.raises(Overloaded, match="full"):
            await answer_of(set_of((Overloaded("full"),), (Overloaded("full"),)))

    run(scenario())


def test_a_front_end_that_no_model_answers_names_the_others_and_their_reasons():
    async def scenario():
        replicas = set_of((), ())

        async def probe(with_metrics):
            raise EngineUnavailable("gone")

        replicas.local.backend.probe = probe
        replicas.fakes[0].suspend("unavailable: connection refused")
        with pytest.raises(ModelUnreachable, match="no other replica does .replica 0: unavailable: connection refused"):
            await ReplicatedBackend(replicas).probe()
        replicas.has_model, replicas.local.backend.probe = False, None  # a scheduler asks no model of its own
        with pytest.raises(ModelUnreachable, match="^no decode instance answers .replica 0: unavailable"):
            await ReplicatedBackend(replicas).probe()
        replicas.fakes.clear()
        with pytest.raises(ModelUnreachable, match="REPLICAS has no other server that can be found"):
            await ReplicatedBackend(replicas).probe()

    run(scenario())


def test_an_error_of_the_request_or_a_request_that_kills_replicas_is_not_sent_on():
    async def scenario():
        replicas = set_of((InvalidRequest("wrong"),), ("a",))
        busy(replicas, 1)
        with pytest.raises(InvalidRequest):
            await answer_of(replicas)
        assert replicas.fakes[0].backend.bodies == []
        deadly = set_of(*[(ModelLost("died"),)] * 6)
        with pytest.raises(EngineUnavailable, match="died"):
            await answer_of(deadly)
        assert sum(len(each.backend.bodies) for each in (deadly.local, *deadly.fakes)) == 4

    run(scenario())


def test_a_resumed_answer_is_found_where_it_was_computed():
    async def scenario():
        replicas = set_of(("x",), ("a", "b"))
        replicas.fakes[0].backend.sent_texts["r"] = ["a"]
        busy(replicas, 1)
        await answer_of(replicas, {**ASK, "resume_from": 1})
        assert replicas.local.backend.bodies == []
        assert replicas.fakes[0].backend.bodies[0]["infer_seed"] == with_seed(ASK)["infer_seed"]

    run(scenario())


def test_an_abort_reaches_the_replica_that_computes():
    async def scenario():
        replicas = set_of((), ())

        async def unknown(req_id, owner):
            return await FakeBackend().abort(req_id, owner) and type(first)(req_id, False)

        first = await replicas.fakes[0].backend.abort("r", Owner())
        replicas.local.backend.abort = unknown
        replicas.fakes[0].suspend("it missed a poll")
        assert (await ReplicatedBackend(replicas).abort("r", Owner())).aborted
        assert replicas.fakes[0].backend.aborts[-1] == ("r", "")

    run(scenario())


# --- between two gateways ---------------------------------------------------------------------------------------------


def a_delta(text, i):
    return write_answer(Delta("r", text, [i], i, Usage(3, i + 1), 5))


@contextlib.asynccontextmanager
async def a_worker(folder, triton, **settings):
    """Yield a server with replicas, and the port of its gateway."""
    config = Config(run_dir=str(folder), **settings)
    local = FakeBackend(state=ModelState(ready=True, model_hash="m", num_open=3))
    async with serving(folder, triton, replicas=ReplicaSet(local, config), **settings) as (front, port):
        yield front, port


def test_a_forwarded_request_is_answered_by_the_model_of_the_worker(tmp_path):
    async def scenario():
        triton = FakeTriton(a_delta("a", 0), a_delta("b", 1), NEVER)
        keys = {"api_key": "secret"}
        async with a_worker(tmp_path, triton, **keys) as (_, port):
            token = ReplicaSet(FakeBackend(), Config(**keys)).token
            replica = RemoteReplica(("127.0.0.1", port), "", token, None)
            await replica.poll()
            assert (replica.state.num_open, replica.model, replica.num_running) == (3, "m", 3)
            answers = replica.generate({**ASK, "text": "x" * 300}, prompt_keys(ASK), 5)
            assert [(await anext(answers)).token for _ in range(2)] == ["a", "b"]
            assert (await replica.poll(("", "r"))).has_request
            assert len(list(replica.known)) == 1
            replica.lose("no answer for 2 s")
            with pytest.raises(ModelLost):
                await anext(answers)
            await triton.is_cancelled.wait()

    run(scenario())


@pytest.mark.slow
def test_the_prompt_of_a_forwarded_request_waits_until_its_first_answer_on_a_shared_stream(tmp_path):
    async def scenario():
        triton = FakeTriton(a_delta("a", 0), NEVER)
        async with a_worker(tmp_path, triton) as (front, port):
            load = partial(front._of_replicas._replicas.served.load, "of another front end")
            token = ReplicaSet(FakeBackend(), Config()).token
            replica = RemoteReplica(("127.0.0.1", port), "", token, None)
            asked = {**ASK, "text": "x" * 1024}
            first = replica.generate(asked, prompt_keys(asked), 5)
            assert (await anext(first)).token == "a" and load() == Load(1, 0)
            triton.script, triton.on_shared_stream = (
                (NEVER,),
                (inference_fake.WAIT, write_shared([(1, a_delta("b", 0))]), NEVER),
            )
            others = [{**ASK, "req_id": name, "text": name * 1024} for name in "st"]  # they share a stream
            streams = [replica.generate(each, prompt_keys(each), 5) for each in others]
            waiting, begun = [asyncio.ensure_future(anext(each)) for each in streams]
            while load() != Load(3, 2 * 257):
                await asyncio.sleep(0.005)
            triton.go.set()
            assert (await begun).token == "b" and load() == Load(3, 257)
            waiting.cancel()

    run(scenario())


def test_a_client_of_grpc_gets_its_answer_from_all_replicas_too(tmp_path):
    async def scenario():
        replicas = set_of(("a", "b", ModelLost("gone")), ("c",))
        busy(replicas, 1)
        async with serving(tmp_path, FakeTriton(), replicas=replicas) as (_, port), a_client(port) as client:
            found = [each async for each in client.ModelStreamInfer(iter([a_request("x", req_id="r")]))]
            assert [text_of_response(each) for each in found] == ["a", "b", "c", ""]
            assert [each.infer_response.id for each in found] == ["x"] * 4
            ends = [each.infer_response.parameters["triton_final_response"].bool_param for each in found]
            assert ends == [False, False, False, True]
            full = set_of((InvalidRequest("wrong"),))
            replicas.local.backend, replicas.fakes = full.local.backend, []
            replicas.local.state = full.local.state
            [(_, error, _)] = await answers(client.ModelStreamInfer(iter([a_request("y", req_id="q")])))
            assert (error["error_msg"], error["req_id"]) == ("wrong", "q")

    run(scenario())


def test_a_replica_with_other_api_keys_is_refused_with_the_reason(tmp_path):
    async def scenario():
        async with a_worker(tmp_path, FakeTriton("a"), api_key="secret") as (_, port):
            connections = ReplicaConnections(("127.0.0.1", port), "", "wrong", None)
            with pytest.raises(grpc.aio.AioRpcError, match="API_KEY and API_KEYS must be equal on all replicas"):
                await connections.poll(b"", 5)
            with pytest.raises(ModelLost, match="must be equal"):
                await anext(TritonBackend(connections).generate(ASK, 5))
            await connections.close()

    run(scenario())


def test_replicas_use_tls_with_each_other_if_they_have_a_certificate(tmp_path):
    async def scenario():
        folder = Path(__file__).parents[2] / "certificates"
        files = {"tls_cert_file": str(folder / "server.pem"), "tls_key_file": str(folder / "server.key")}
        credentials = grpc.ssl_server_credentials([key_and_chain(Config(**files))])
        replicas = ReplicaSet(FakeBackend(state=ModelState(ready=True)), Config(**files))
        async with serving(tmp_path, FakeTriton(), credentials, replicas=replicas, **files) as (_, port):
            own = replica_credentials(Config(**files))
            encrypted = RemoteReplica(("127.0.0.1", port), "llm.example", replicas.token, own)
            await encrypted.poll()
            assert encrypted.is_ready
            for host, trusted in (("llm.example", grpc.ssl_channel_credentials()), ("other.example", own)):
                other = RemoteReplica(("127.0.0.1", port), host, replicas.token, trusted)
                with pytest.raises(grpc.aio.AioRpcError):
                    await other.poll(within_s=2)
                await other.backend.close()
            await encrypted.backend.close()

    run(scenario())
