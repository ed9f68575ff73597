"""Grammar workers: what harms them harms no other request, and an answer goes on in another one."""

import json
import os
import signal
import time
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import pytest

from engine.core.grammar import MaskRow
from engine.core.types import Request, Sampling
from engine.errors import Cancelled, InvalidRequest, Overloaded, RequestError, SetupError, TokenizerError
from engine.grammars import compiler, pool, workers
from engine.grammars.compile_budget import CompileBudget
from engine.grammars.pool import GrammarPool
from engine.settings.config import Config
from server_scripts.run_dir import children_of
from tests.byte_tokenizer import EOS_ID
from tests.patience import wait_until
from tests.pure.guided import PROMPT, STOP_IDS, VOCAB_SIZE, Guided, a_request, begun, load_tokenizer
from tests.pure.random_schemas import random_schema

pytestmark = pytest.mark.slow

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}
# The library descends without an end, see engine.wire.json_bounds.
CRASHING = {"type": "integer", "minimum": -(2**63), "maximum": -(2**63) + 8}
ENDLESS = {"type": "integer", "multipleOf": 7777777}  # 300 s and 4 GB
LONG = {"type": "integer", "multipleOf": 99991}  # a second


@pytest.fixture(autouse=True)
def no_wall_limit(monkeypatch):
    """Let long compilations take as long as other processes make them: their limit of CPU time remains."""
    monkeypatch.setattr(compiler, "LONG_WALL_FACTOR", 10_000)


@contextmanager
def grammars(**settings):
    made = GrammarPool(load_tokenizer, VOCAB_SIZE, Config(**settings))
    try:
        yield made
    finally:
        made.close()


def raw_request(name, schema, owner="", **sampling):
    """Return a request that has not been checked."""
    structured_output = ("guided_json", json.dumps({"grammars": [{"json_schema": schema}]}))
    request = Request(
        name,
        list(PROMPT),
        len(PROMPT),
        Sampling(900, stop_token_ids=STOP_IDS, structured_output=structured_output, **sampling),
    )
    request.owner = owner
    return request


def refusal(made, request):
    with pytest.raises(RequestError) as caught:
        begun(made, request)
    return caught.value


def server_pid(made):
    return made._workers._server._process.pid


def worker_pids(made):
    return children_of(server_pid(made))


def signal_workers(made, number):
    for pid in worker_pids(made):
        with suppress(ProcessLookupError):  # It may end by itself between the two calls.
            os.kill(pid, number)


# Limits


def test_a_grammar_that_crashes_its_worker_is_refused_and_others_go_on(tokenizer):
    with grammars() as made:
        guided = Guided(tokenizer, grammars=made)
        guided.run(
            raw_request("bad", CRASHING), a_request("good", "guided_json", PERSON), raw_request("again", CRASHING)
        )
        assert guided.json("good")
        for name in ("bad", "again"):
            error = guided.errors[name]
            assert (type(error), error.field) == (InvalidRequest, "guided_json")
            assert str(error) == "The `guided_json` crashes the grammar compiler"
        wait_until(lambda: len(worker_pids(made)) == 1)  # that of the good one


def test_a_grammar_that_takes_too_long_is_refused_with_the_limit_and_remembered(monkeypatch):
    with grammars(grammar_compile_timeout_s=0.2) as made:
        error = refusal(made, raw_request("a", ENDLESS))
        assert (type(error), error.field, error.limit) == (InvalidRequest, "guided_json", 0.2)
        assert str(error) == "The `guided_json` takes more than 0.2 s of CPU time to compile (GRAMMAR_COMPILE_TIMEOUT)"
        wait_until(lambda: not worker_pids(made))
        monkeypatch.setattr(made._workers, "start", None)
        assert str(refusal(made, raw_request("b", ENDLESS))) == str(error)


def test_a_grammar_that_needs_too_much_memory_is_refused_with_the_limit():
    with grammars(grammar_memory_mb=64) as made:
        error = refusal(made, raw_request("a", ENDLESS))
        assert (type(error), error.field, error.limit) == (InvalidRequest, "guided_json", 64)
        assert str(error) == "The `guided_json` needs more than 64 MiB of memory (GRAMMAR_MEMORY)"


def test_a_grammar_that_takes_long_to_compile_delays_no_other_one(tokenizer):
    with grammars(grammar_compile_timeout_s=120.0, grammar_compile_budget_s=600.0) as made:
        guided = Guided(tokenizer, grammars=made)
        guided.run(a_request("first", "guided_json", PERSON))
        endless = [made.begin(raw_request(str(index), {**ENDLESS, "title": str(index)})) for index in range(4)]
        guided.run(a_request("known", "guided_json", PERSON))
        guided.run(a_request("new", "guided_choice", ["x"]))
        assert guided.json("known") and guided.text("new") == "x"
        assert not any(each.done() for each in endless)


def test_a_client_that_leaves_ends_the_compilation_unless_another_one_waits_for_it():
    with grammars() as made:
        first, second = made.begin(raw_request("a", ENDLESS)), made.begin(raw_request("b", ENDLESS))
        begun(made, raw_request("another", PERSON))
        grammar = made._compiler.grammars[0]
        while not (grammar.is_long and grammar.process):
            made.poll(1)
        made.cancel(first)
        assert isinstance(first.exception(), Cancelled) and grammar.process
        made.cancel(second)
        assert isinstance(second.exception(), Cancelled)
        wait_until(lambda: len(worker_pids(made)) == 1)
        assert not made.is_busy


def test_a_client_that_leaves_ends_the_compilation(tokenizer):
    with grammars() as made:
        guided = Guided(tokenizer, grammars=made)
        request = raw_request("a", ENDLESS)
        request.forks = [raw_request("b", ENDLESS)]
        guided.loop.add(request)
        for name in ("a", "b"):
            assert not guided.loop.is_idle
            guided.loop.drop(name)
        while not guided.loop.is_idle:
            guided.turn()
        assert guided.ends == {}
        wait_until(lambda: not worker_pids(made))


def test_an_owner_that_compiles_too_much_has_to_wait_except_for_small_grammars():
    with grammars(grammar_compile_budget_s=1.0, grammar_compile_timeout_s=2.0) as made:
        assert refusal(made, raw_request("a", ENDLESS, owner="hostile")).code == 400
        error = refusal(made, raw_request("b", LONG, owner="hostile"))
        assert (type(error), error.code, error.limit) == (Overloaded, 429, 1.0)
        assert 1 <= error.retry_after_s < 90
        assert begun(made, raw_request("c", PERSON, owner="hostile"))
        assert begun(made, raw_request("d", LONG, owner="other"))


def test_a_budget_comes_back_in_time():
    now = [0.0]
    budget = CompileBudget(30, clock=lambda: now[0])
    assert budget.wait_s("a") == 0
    budget.charge("a", 40)
    assert (budget.wait_s("a"), budget.wait_s("b")) == (21, 0)
    now[0] = 21
    assert budget.wait_s("a") == 0
    budget.charge("a", 1)
    assert budget.wait_s("a") == 2


def test_no_more_requests_wait_for_their_grammars_than_may_wait(tokenizer):
    with grammars() as made:
        guided = Guided(tokenizer, grammars=made, max_cached_task_num=1)
        guided.loop.add(raw_request("a", ENDLESS))
        with pytest.raises(Overloaded):
            guided.loop.add(raw_request("b", ENDLESS))


def test_workers_that_are_not_needed_end(monkeypatch):
    monkeypatch.setattr(compiler, "MAX_IDLE", 2)
    with grammars() as made:
        for index in range(6):
            begun(made, raw_request("a", {"const": index}))
        made.poll()
        wait_until(lambda: len(worker_pids(made)) == 2)
        monkeypatch.setattr(made, "_open", None)
        assert [json.loads(each)["grammars"][0]["json_schema"]["const"] for each in made._compiler._grammars] == [4, 5]


def test_a_worker_that_was_not_needed_for_long_ends_also_when_there_is_nothing_else_to_do(tokenizer, monkeypatch):
    with grammars() as made:
        guided = Guided(tokenizer, grammars=made)
        guided.run(a_request("a", "guided_choice", ["x"]))
        guided.run(a_request("b", "guided_regex", "y{9}", max_new_tokens=2))  # cut off: no step follows its last token
        made.poll()
        assert len(worker_pids(made)) == 2
        now = time.monotonic()
        monkeypatch.setattr(compiler.time, "monotonic", lambda: now + 30)
        guided.turn()
        assert made._compiler.grammars
        monkeypatch.setattr(compiler.time, "monotonic", lambda: now + 100)
        guided.turn()
        assert not made._compiler.grammars
        wait_until(lambda: not worker_pids(made))


def test_errors_of_grammars_keep_no_request_alive(tokenizer):
    """A traceback has the frames of the step, and these have the requests that ended in it: their workers would run
    until the garbage collector finds them."""
    with grammars() as made:
        guided = Guided(tokenizer, grammars=made)
        guided.loop.add(raw_request("refused", {"type": "nothing"}))
        guided.loop.add(raw_request("crashing", CRASHING))
        guided.run()
        assert [each.__traceback__ for each in guided.errors.values()] == [None, None]


# Deaths


def an_answer(tokenizer, made, disturb=lambda: None, **settings):
    """Generate an answer for each of several schemas, with `disturb` called before every step."""
    guided = Guided(tokenizer, grammars=made, **settings)
    for seed in range(6):
        guided.loop.add(a_request(f"{seed}", "guided_json", random_schema(seed), seed=seed, forks=1))
    while not guided.loop.is_idle:
        disturb()
        guided.turn()
    guided.loop.scheduler.check()
    assert not any(guided.errors.values())
    return without_stop_ids(guided)


@lru_cache
def undisturbed(tokenizer):
    """Return the answer that every disturbed `an_answer` must equal."""
    with grammars() as made:
        return an_answer(tokenizer, made)


def without_stop_ids(guided):
    """Return the answers without their stop ids, because which of several ends an answer depends on where it was
    resumed.
    """
    return {name: each[:-1] for name, each in guided.token_ids.items() if name != "free"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", ["none", "ngram"])
def test_answers_are_the_same_when_their_workers_are_killed(tokenizer, method, monkeypatch):
    monkeypatch.setattr(compiler, "MAX_LOSSES", 1000)
    with grammars() as made:
        turns = iter(range(10**9))
        kill = lambda: next(turns) % 20 or signal_workers(made, signal.SIGKILL)  # noqa: E731
        assert an_answer(tokenizer, made, kill, speculate_method=method) == undisturbed(tokenizer)


def test_answers_are_the_same_when_the_fork_server_is_killed(tokenizer):
    with grammars() as made:
        deaths = iter([5, 40])
        turns = iter(range(10**9))
        at = [next(deaths)]

        def kill():
            if next(turns) == at[0]:
                os.kill(server_pid(made), signal.SIGKILL)
                at[0] = next(deaths, -1)

        assert an_answer(tokenizer, made, kill) == undisturbed(tokenizer)
        assert at == [-1]


def test_an_answer_whose_mask_is_late_is_left_out_of_steps_until_it_comes(tokenizer):
    """Its worker is stopped, other requests continue, and its tokens are the same."""
    with grammars() as made:
        expected = an_answer(tokenizer, made)  # so that every worker runs already
        guided = Guided(tokenizer, grammars=made)
        for seed in range(6):
            guided.loop.add(a_request(f"{seed}", "guided_json", random_schema(seed), seed=seed, forks=1))
        while not guided.token_ids:
            guided.turn()
        guided.turn()
        signal_workers(made, signal.SIGSTOP)
        guided.loop.add(a_request("free", None, None, max_new_tokens=50))
        while "free" not in guided.ends:
            guided.turn()
        num_tokens = sum(len(each) for name, each in guided.token_ids.items() if name != "free")
        for _ in range(5):
            guided.turn()
        assert sum(len(each) for name, each in guided.token_ids.items() if name != "free") == num_tokens
        signal_workers(made, signal.SIGCONT)
        guided.run()
        assert without_stop_ids(guided) == expected


def test_the_rows_of_a_late_mask_are_free_again_when_its_worker_has_ended(tokenizer):
    with grammars() as made:
        request = raw_request("a", {"const": "xyz"})
        [request.grammar] = begun(made, request)
        signal_workers(made, signal.SIGSTOP)
        made.masks([MaskRow(request, tokenizer.encode('"'))])
        assert [*made._late_rows_ends()] == [2]
        signal_workers(made, signal.SIGKILL)
        wait_until(lambda: made.poll(0.01) or not [*made._late_rows_ends()])


def test_a_worker_that_hangs_is_replaced(tokenizer, monkeypatch):
    expected = undisturbed(tokenizer)
    with grammars() as made:
        monkeypatch.setattr(compiler, "HUNG_S", 2.0)
        stop = iter([*[lambda: None] * 10, lambda: signal_workers(made, signal.SIGSTOP)])
        assert an_answer(tokenizer, made, lambda: next(stop, lambda: None)()) == expected


def test_a_fork_server_that_hangs_is_replaced(tokenizer, monkeypatch):
    with grammars() as made:
        made.wait_until_loaded()
        monkeypatch.setattr(compiler, "HUNG_S", 0.1)
        monkeypatch.setattr(workers, "KILL_S", 0.1)
        stopped = server_pid(made)
        os.kill(stopped, signal.SIGSTOP)
        future = made.begin(raw_request("a", PERSON))
        while not made._workers._server or server_pid(made) == stopped:
            made.poll(1)
        monkeypatch.undo()
        while not future.done():
            made.poll(1)
        assert future.result()


def test_a_grammar_whose_workers_always_end_is_refused():
    with grammars() as made:
        future = made.begin(raw_request("a", ENDLESS))
        while not future.done():
            signal_workers(made, signal.SIGKILL)
            made.poll(0.1)
        assert future.exception().code == 503


def test_with_late_workers_and_no_rows_left_a_step_has_rows_of_its_own(tokenizer, monkeypatch):
    monkeypatch.setattr(pool, "ROWS_OF_ANSWER", 1)
    with grammars(batch_size=6) as made:
        signals = [signal.SIGSTOP, *[0] * 20, signal.SIGCONT]
        steps = iter([*[0] * 10, *signals * 3])
        disturb = lambda: signal_workers(made, next(steps, 0))  # noqa: E731
        assert an_answer(tokenizer, made, disturb, batch_size=6) == undisturbed(tokenizer)


def no_tokenizer():
    raise TokenizerError("there is none")


def test_without_a_vocabulary_requests_are_refused_and_nothing_else_fails():
    made = GrammarPool(no_tokenizer, VOCAB_SIZE)
    assert refusal(made, raw_request("a", PERSON)).code == 503
    with pytest.raises(SetupError, match="there is none"):
        made.wait_until_loaded()
    made.close()


def test_the_processes_end_with_the_engine():
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        made = GrammarPool(load_tokenizer, VOCAB_SIZE)
        begun(made, raw_request("a", PERSON))
        os.write(write, json.dumps([server_pid(made), *worker_pids(made)]).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    pids = json.loads(os.read(read, 1000))
    os.waitpid(pid, 0)
    assert len(pids) == 2
    wait_until(lambda: not any(Path(f"/proc/{each}/exe").exists() for each in pids))
    os.close(read)
    os.close(write)


def test_stop_ids_of_a_request_are_kept_in_another_worker(tokenizer):
    [own] = tokenizer.encode("!")
    with grammars() as made:
        guided = Guided(tokenizer, grammars=made)
        bias = ((own, 100.0), (EOS_ID, 50.0))
        guided.loop.add(a_request("a", "guided_regex", "[ab]{30}[ab]*", stop_token_ids=(own,), logit_bias=bias))
        while not guided.token_ids:
            guided.turn()
        signal_workers(made, signal.SIGKILL)
        guided.run()
        assert (guided.ends["a"], guided.token_ids["a"][-1]) == ("stop", own)
