"""Beam search: the answers of Hugging Face's generate, whatever else is computed, and blocks that come back."""

import random

import numpy as np
import pytest

from engine.core.beam_search import BeamSearch
from engine.core.loop import EngineLoop
from engine.core.types import Logprobs, Request, Sampling
from engine.errors import InvalidRequest
from engine.executors import make_executor
from engine.executors.reference import ReferenceExecutor
from engine.executors.speculation.executor import with_speculation
from engine.settings.config import Config
from tests.checkpoints import FAMILIES
from tests.golden.beams import BEAMS, MAX_NEW_TOKENS, STOP_IDS
from tests.golden_arrays import golden
from tests.pure.core.test_prompt_outputs import READ_LEN, run
from tests.pure.counting_executor import CountingExecutor


def expected(family, width, penalty):
    """Return the answers up to the first stop id; the rest is padding."""
    rows = golden("prompt_outputs")[f"{family}_beams_{width}_{penalty}"].tolist()
    ends = [next((at for at, each in enumerate(row, 1) if each in STOP_IDS), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


def a_search(name, prompt, width, penalty=1.0, **sampling):
    """Return a search whose beams are all wanted as answers."""
    fields = {"max_new_tokens": MAX_NEW_TOKENS, "stop_token_ids": STOP_IDS, **sampling}
    asked = Sampling(num_beams=width, length_penalty=penalty, **fields)
    leader, *leader_forks = (Request(f"{name}.{n}", list(prompt), len(prompt), asked) for n in range(width))
    leader.forks = leader_forks
    return leader


def answers_of(token_ids, name, count):
    return [list(token_ids[f"{name}.{n}"]) for n in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_answers_are_those_of_transformers(family, exported):
    """All searches run at once, with their prompts in chunks, next to sampled answers."""
    prompt = golden(family)[f"prompt_{READ_LEN}"].tolist()
    config = Config(batch_size=20, max_num_batched_tokens=50, block_bs=4)
    executor = make_executor(exported(family), config)
    executor.allocate(64)
    loop = EngineLoop(executor, 64, config)
    others = [Request(f"other {n}", prompt[n:], READ_LEN - n, Sampling(60, seed=n)) for n in range(2)]
    searches = [a_search(f"{width}", prompt, width, penalty) for width, penalty in BEAMS[:1] + BEAMS[2:]]
    token_ids, _, ends = run(loop, *others, *searches)
    for width, penalty in BEAMS[:1] + BEAMS[2:]:
        found = answers_of(token_ids, str(width), width)
        assert found == expected(family, width, penalty)
        reasons = ["stop" if each[-1] in STOP_IDS else "length" for each in found]
        assert [ends[f"{width}.{n}"] for n in range(width)] == reasons
    executor.close()


def test_few_blocks_preempt_a_search_which_then_finds_the_same(exported):
    prompt = golden("qwen2")[f"prompt_{READ_LEN}"].tolist()
    executor = ReferenceExecutor(exported("qwen2", block_size=16))
    executor.allocate(17)
    loop = EngineLoop(executor, 17, Config(batch_size=8, block_ratio=0.99, max_num_batched_tokens=80))
    others = [Request(f"other {n}", [n, 2, 3], 3, Sampling(60, temperature=0)) for n in range(4)]
    token_ids, _, _ = run(loop, *others, a_search("4", prompt, 4, 2.0))
    assert loop.stats()["num_preemptions"] > 0
    assert answers_of(token_ids, "4", 4) == expected("qwen2", 4, 2.0)
    loop.scheduler.check()


class Opinions(CountingExecutor):
    """The likeliest of what may follow depend on all tokens before."""

    def _choose(self, batch):
        output = super()._choose(batch)
        rows = [row for row in batch.rows if row.num_sampled]
        slots = [(row, self.slots[slot]) for row in rows for slot in (row.slot, *row.forks)]
        logprobs = []
        for (row, slot), of_row in zip(slots, output.logprobs, strict=True):
            if of_row and slot.sampling.num_beams:
                of_row = [opinion(slot.token_ids[: row.start + len(row.token_ids)], slot.sampling.num_logprobs)]
            logprobs.append(of_row)
        return output._replace(logprobs=logprobs)


def opinion(token_ids, count):
    rng = random.Random(str(token_ids))
    weights = np.array([rng.random() for _ in range(40)])
    logprobs = np.log(weights / weights.sum())
    top = np.argsort(-logprobs)[:count]
    return Logprobs(float(logprobs[top[0]]), tuple((int(each), float(logprobs[each])) for each in top))


def alone(prompt, sampling):
    """Return the answers of the same search without an engine."""
    search = BeamSearch(sampling)
    while not search.is_over:
        search.advance([opinion([*prompt, *beam.token_ids], 40) for beam in search.running])
    return [list(beam.token_ids) for beam in search.finished]


def random_searches(rng):
    for n in range(12):
        prompt = [rng.randrange(40) for _ in range(rng.randint(1, 14))]
        stop_ids = tuple(rng.sample(range(40), rng.randint(0, 3)))
        sampling = {"max_new_tokens": rng.randint(1, 12), "stop_token_ids": stop_ids, "num_logprobs": 1}
        yield a_search(n, prompt, rng.randint(1, 5), rng.choice([0.0, 1.0, 2.0]), **sampling)


def run_and_drop(loop, dropped):
    """Return the answers; the requests in `dropped` are dropped after three steps."""
    found, num_steps = {}, 0
    while not loop.is_idle:
        for update in loop.step():
            found.setdefault(update.request.request_id, []).extend(update.token_ids)
            if update.logprobs:
                assert [len(each.top) for each in update.logprobs] == [1] * len(update.token_ids)
        num_steps += 1
        for name in dropped if num_steps == 3 else ():
            loop.drop(name)
    return found


@pytest.mark.parametrize(("num_blocks", "block_ratio"), [(300, 0.75), (40, 0.95), (60, 1.0)])
def test_searches_of_all_widths_come_and_go_and_every_block_comes_back(num_blocks, block_ratio):
    """The executor detects a beam that reads the tokens of another, and a write to a shared block."""
    loop = EngineLoop(Opinions(num_blocks, 4), num_blocks, Config(batch_size=12, block_ratio=block_ratio))
    searches = list(random_searches(random.Random(5)))
    plain = [Request(f"plain {n}", [n], 1, Sampling(50, temperature=0)) for n in range(4)]
    asked = {number: (list(each.token_ids), each.sampling) for number, each in enumerate(searches)}
    dropped = [number for number in (0, 4, 8) if searches[number].forks]
    for each in (*plain, *searches):
        loop.add(each)
    found = run_and_drop(loop, [f"{number}.{asked[number][1].num_beams - 1}" for number in dropped])
    loop.scheduler.check()
    assert not loop.scheduler._queue.leader_of
    for number, (prompt, sampling) in asked.items():
        if number not in dropped:
            assert answers_of(found, number, sampling.num_beams) == alone(prompt, sampling)
    assert all(found[f"plain {n}"] == list(range(n + 1, n + 51)) for n in range(4))
    assert dropped and (loop.stats()["num_preemptions"] > 0) == (num_blocks == 40)


def test_fewer_answers_than_beams_are_the_best_of_them():
    leader = a_search("a", [5], 4, stop_token_ids=(3,))
    leader.forks = leader.forks[:1]
    loop = EngineLoop(Opinions(64, 4), 64, Config())
    token_ids, outputs, _ = run(loop, leader)
    assert [list(token_ids[f"a.{n}"]) for n in range(2)] == alone(
        [5], a_search("a", [5], 4, stop_token_ids=(3,)).sampling
    )[:2]
    assert set(outputs) == {"a.0", "a.1"}


def test_a_search_beside_drafts_has_none():
    config = Config(speculate_method="ngram")
    loop = EngineLoop(with_speculation(Opinions(64, 4), config), 64, config)
    prompt = [5, 6, 7, 5, 6, 7, 5, 6]
    token_ids, _, _ = run(loop, a_search("a", prompt, 3), Request("plain", [*prompt], 8, Sampling(8, temperature=0)))
    assert answers_of(token_ids, "a", 3) == alone(prompt, a_search("a", prompt, 3).sampling)
    assert loop.stats()["num_drafted_tokens"] > 0


def test_a_search_is_preempted_and_computed_again_before_those_that_wait():
    loop = EngineLoop(Opinions(13, 4), 13, Config(batch_size=5, block_ratio=0.99))
    older = [Request(f"older {n}", [n] * 7, 7, Sampling(10, temperature=0)) for n in range(3)]
    forks = [Request(f"waits {n}", [9], 1, Sampling(2, temperature=0)) for n in range(4)]
    waits = [Request("waits", [9], 1, Sampling(2, temperature=0), forks, priority=-1)]
    search = a_search("a", [5, 6], 2, max_new_tokens=10, stop_token_ids=())
    order = []
    for each in (*older, search):
        loop.add(each)
    while not loop.is_idle:
        order += [update.request.request_id for update in loop.step() if update.finish_reason]
        if waits and loop.stats()["num_preemptions"]:
            loop.add(waits.pop())
    assert order[:5] == [*(each.request_id for each in older), "a.0", "a.1"]


def test_more_beams_than_the_server_computes_at_once_are_refused():
    loop = EngineLoop(Opinions(64, 4), 64, Config(batch_size=4))
    with pytest.raises(InvalidRequest, match="The `best_of` is 5, the server computes 4 answers at once .BATCH_SIZE."):
        loop.add(a_search("a", [5], 5))


def test_a_search_whose_model_breaks_down_ends_with_all_its_answers():
    loop = EngineLoop(Opinions(64, 4), 64, Config())
    loop.executor._choose = lambda batch: CountingExecutor._choose(loop.executor, batch)._replace(
        logprobs=[[Logprobs(float("nan"))] for row in batch.rows for _ in (row.slot, *row.forks)]
    )
    _, _, ends = run(loop, a_search("a", [5], 3))
    assert ends == {f"a.{n}": "failed" for n in range(3)}
    loop.scheduler.check()
