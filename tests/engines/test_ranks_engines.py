"""Several ranks as one executor, in processes of their own: the same tokens, and one end for all."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.core.loop import EngineLoop
from engine.core.types import Sampling
from engine.errors import ConfigError, InvalidRequest, SetupError
from engine.executors import expert_usage, make_executor
from engine.executors.distributed.ranks import RankFailed
from engine.exporting.export import ExportOptions, export
from engine.link.journal import JournalEntry, Submission
from engine.models.adapters import identified
from engine.ops.cpu.kernels import GroupError
from engine.settings.config import Config
from engine.settings.processes import EXPERT_USAGE_FILE
from server_scripts.run_dir import children_of
from tests.lora_adapters import make_adapter
from tests.mtp_checkpoints import make_mtp_checkpoint, make_right
from tests.patience import PATIENCE_S, wait_until
from tests.pure.core.test_beams import a_search
from tests.pure.core.test_prompt_outputs import hidden_of, requests_of
from tests.pure.core.test_prompt_outputs import run as run_loop
from tests.pure.engine_helpers import DRAFTING_ENGINE, Collector, a_client
from tests.pure.executors.test_batch_invariance import BLOCK_SIZE, NUM_REQUESTS, random_requests, run
from tests.pure.models.test_family_goldens import cases
from tests.pure.models.test_ranks import answers_of_ranks
from tests.server import ROOT, is_alive


def answers_of(graph_dir, requests, **settings):
    config = Config(max_dec_len=64, batch_size=NUM_REQUESTS, **settings)
    executor = make_executor(graph_dir, config)
    try:
        executor.allocate(400)
        return run(executor, config, requests)[0]
    finally:
        executor.close()


def tokens_of(answers):
    return {index: [token_id for token_id, _ in answer] for index, answer in answers.items()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_sample_the_tokens_of_one_and_are_batch_invariant(exported, num_ranks):
    requests = random_requests(seed=2)[:8]
    one = answers_of(exported("qwen2", block_size=BLOCK_SIZE), requests)
    graph_dir = exported("qwen2", block_size=BLOCK_SIZE, num_ranks=num_ranks)
    settings = {"mp_num": num_ranks, "cpu_threads": 1}
    together = answers_of(graph_dir, requests, max_num_batched_tokens=64, **settings)
    assert tokens_of(together) == tokens_of(one)
    assert answers_of(graph_dir, requests, max_num_batched_tokens=17, **settings) == together


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "gpt_oss"])
def test_ranks_with_some_of_the_experts_have_the_answers_of_one_and_are_batch_invariant(exported, family):
    expected = cases(family)
    graph_dir = exported(family, block_size=BLOCK_SIZE, num_ranks=2, expert_parallel=True)
    settings = {"mp_num": 2, "cpu_threads": 1, "enable_expert_parallel": True}
    greedy = [(prompt, Sampling(64, temperature=0, num_logprobs=0)) for prompt, _ in expected.values()]
    found = tokens_of(answers_of(graph_dir, greedy, max_num_batched_tokens=24, **settings))
    assert list(found.values()) == [tokens for _, tokens in expected.values()]
    requests = random_requests(seed=2)[:6]
    together = answers_of(graph_dir, requests, max_num_batched_tokens=64, **settings)
    assert answers_of(graph_dir, requests, max_num_batched_tokens=17, **settings) == together


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "gpt_oss"])
def test_experts_that_are_placed_by_their_usage_give_the_answers_of_one_rank(exported, family, tmp_path, monkeypatch):
    """The usage is that of the first answers. The counts are those of the same experts in both cases. The router of
    DeepSeek-V2 chooses among two groups, one for each rank, which stay where they are or change places."""
    expected = cases(family)
    graph_dir = exported(family, block_size=BLOCK_SIZE, num_ranks=2, expert_parallel=True)
    greedy = [(prompt, Sampling(64, temperature=0, num_logprobs=0)) for prompt, _ in expected.values()]
    config = Config(
        run_dir=str(tmp_path), mp_num=2, cpu_threads=1, enable_expert_parallel=True, batch_size=NUM_REQUESTS
    )
    monkeypatch.setattr(expert_usage, "MIN_TOKENS", 1)
    counts, loads = [], []
    for _ in range(2):
        executor = make_executor(graph_dir, config)
        executor.allocate(400)
        found = tokens_of(run(executor, config, greedy)[0])
        assert list(found.values()) == [tokens for _, tokens in expected.values()]
        counts.append(executor.expert_usage.counts())
        loads.append(executor.expert_usage.stats()["num_busiest_rank_choices"])
        executor.expert_usage.write(tmp_path / EXPERT_USAGE_FILE, graph_dir.name)
        executor.close()
    assert np.array_equal(*counts)
    assert loads[1] <= loads[0]
    assert loads[1] < loads[0] or family == "deepseek_v2"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("quant_type", ["weight_only_int4", "weight_only_fp8", "a8w8"])
def test_packed_matrices_of_some_of_the_experts_give_the_answers_of_those_that_are_not_packed(exported, quant_type):
    options = {"dtype": "bfloat16", "quant_type": quant_type, "num_ranks": 2, "expert_parallel": True}
    graph_dir, (prompt, _) = exported("qwen3_moe", block_size=BLOCK_SIZE, **options), cases("qwen3_moe")[24]
    _, expected = answers_of_ranks(graph_dir, 2, prompt)[0]
    request = prompt, Sampling(len(expected), temperature=0, num_logprobs=0)
    assert tokens_of(answers_of(graph_dir, [request], mp_num=2, cpu_threads=1)) == {0: expected}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "num_ranks"), [("llama3", 2), ("qwen2_untied", 4)])
def test_ranks_have_their_shares_of_adapters(exported, checkpoint, tmp_path, family, num_ranks):
    """The cases have heads that several ranks hold, and matrices that cannot be shared evenly. An adapter that one rank
    cannot load is loaded by none of them.
    """
    adapters = [(), *(identified(make_adapter(tmp_path / f"{n}", checkpoint(family), n)) for n in (1, 2))]
    requests = [(prompt, replace(sampling, temperature=0.0)) for prompt, sampling in random_requests(seed=2)[:6]]
    mixed = [(prompt, replace(each, adapter=adapters[at % 3])) for at, (prompt, each) in enumerate(requests)]
    one = answers_of(exported(family, block_size=BLOCK_SIZE), mixed, lora_dir="/adapters")
    graph_dir = exported(family, block_size=BLOCK_SIZE, num_ranks=num_ranks)
    config = Config(mp_num=num_ranks, cpu_threads=1, lora_dir="/adapters", batch_size=8, max_num_batched_tokens=17)
    executor = make_executor(graph_dir, config)
    executor.allocate(400)
    assert tokens_of(run(executor, config, mixed)[0]) == tokens_of(one)
    shutil.rmtree(tmp_path / "1")
    executor.drop_adapter(adapters[1][0])
    with pytest.raises(InvalidRequest, match="adapter_config.json cannot be read"):
        executor.load_adapter(adapters[1])
    others = {at: [one[2], one[5]][at] for at in range(2)}
    assert tokens_of(run(executor, config, mixed[2::3])[0]) == tokens_of(others)
    executor.close()


def test_ranks_tell_of_prompts_and_search_as_one_does(exported):
    prompt = [7 * n % 300 for n in range(40)]
    results = []
    for num_ranks in (1, 2):
        config = Config(batch_size=8, mp_num=num_ranks, cpu_threads=1, max_num_batched_tokens=17)
        executor = make_executor(exported("qwen2", block_size=BLOCK_SIZE, num_ranks=num_ranks), config)
        executor.allocate(64)
        results.append(run_loop(EngineLoop(executor, 64, config), a_search("s", prompt, 3), *requests_of(prompt)))
        executor.close()
    (one, first_outputs, _), (two, second_outputs, _) = results
    assert one == two
    for name in ("scores", "last", "mean"):
        first, second = first_outputs[name], second_outputs[name]
        np.testing.assert_allclose(hidden_of(first), hidden_of(second), atol=1e-4)
        scores = [[each.chosen for each in results.prompt_logprobs] for results in (first, second)]
        np.testing.assert_allclose(*scores, atol=1e-4)


def test_a_rank_that_cannot_start_ends_the_group_and_says_which(exported, tmp_path):
    broken = shutil.copytree(exported("qwen2", block_size=BLOCK_SIZE, num_ranks=2), tmp_path / "broken")
    program = broken / "rank_1" / "model.json"
    program.write_text(program.read_text()[:1000])
    done = subprocess.run(a_group(broken, 2), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert f"rank 1: {program} is cut off or not JSON" in done.stderr


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_dies_takes_its_group_with_it(exported, number):
    """A rank dies in the middle of a step or idle. The process of the first rank ends, and with it all others."""
    graph_dir = exported("qwen2", block_size=BLOCK_SIZE, num_ranks=4)
    first = subprocess.Popen(a_group(graph_dir, 4), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout.readline() == "ready\n"
        ranks = children_of(first.pid)
        assert len(ranks) == 3
        os.kill(ranks[1], number)
        assert first.wait(PATIENCE_S) == 1
        wait_until(lambda: not any(is_alive(pid) for pid in ranks))
    finally:
        first.kill()
        first.communicate()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_running", [True, False])
def test_a_rank_that_dies_raises_an_exception_in_the_process_of_another_program(exported, is_running):
    """A rank dies in the middle of a step or idle. The other ranks end, and a new group can be started."""
    graph_dir, requests = exported("qwen2", block_size=BLOCK_SIZE, num_ranks=4), random_requests(seed=2)[:8]
    config = Config(max_dec_len=64, batch_size=NUM_REQUESTS, mp_num=4, cpu_threads=1)
    before = children_of(os.getpid())
    executor = make_executor(graph_dir, config, owns_process=False)
    executor.allocate(400)
    expected, _ = run(executor, config, requests)
    ranks = [pid for pid in children_of(os.getpid()) if pid not in before]
    if is_running:
        os.kill(ranks[1], signal.SIGSTOP)  # the others wait for it
        killing = threading.Timer(0.5, os.kill, (ranks[1], signal.SIGKILL))
        killing.start()
        with pytest.raises(GroupError, match="the group of ranks has been ended"):
            run(executor, config, requests)
        killing.join()
    else:
        os.kill(ranks[1], signal.SIGKILL)
    wait_until(lambda: not any(is_alive(pid) for pid in ranks[1:2]))
    with pytest.raises(RankFailed, match="a rank has ended, and the group with it"):
        run(executor, config, requests)
    executor.close()
    wait_until(lambda: not any(is_alive(pid) for pid in ranks))
    assert answers_of(graph_dir, requests, mp_num=4, cpu_threads=1) == expected


@pytest.mark.thorough
def test_answers_with_drafts_go_on_after_the_end_of_a_rank(tmp_path):
    """The engine's process ends with the rank. Another one, as the supervisor starts it, continues the answers, whose
    log-probabilities are those without drafts to the last bit."""
    checkpoint = make_right(make_mtp_checkpoint(tmp_path / "checkpoint", "glm4_moe"), "glm4_moe")
    graph_dir = tmp_path / "out"
    export(checkpoint, graph_dir, ExportOptions(block_size=BLOCK_SIZE, mtp=True, num_ranks=2))
    requests = [
        ([n, n + 1, n + 2], Sampling(600, temperature=n % 2, seed=n, repetition_penalty=1.1, num_logprobs=1))
        for n in range(5, 40, 9)
    ]
    expected = answers_of(graph_dir, requests, mp_num=2, cpu_threads=1)
    env = {"MP_NUM": "2", "CPU_THREADS": "1", "GRAPH_DIR": str(graph_dir), "RUN_DIR": str(tmp_path), "DEVICE": "cpu"}
    env = {**os.environ, **env, "SPECULATE_METHOD": "mtp"}
    engines, names = [], itertools.count()
    try:
        with a_client(f"ipc://{tmp_path}/engine.sock") as client:
            engines.append(subprocess.Popen(DRAFTING_ENGINE, cwd=ROOT, env=env))

            def in_the_middle():
                """Return the listeners of requests, unless one has ended, as it may have on a fast machine."""
                listeners = [Collector() for _ in requests]
                for (prompt, sampling), listener in zip(requests, listeners, strict=True):
                    client.submit(JournalEntry.of(prompt, [Submission(str(next(names)), sampling, listener)]))
                wait_until(lambda: min(len(listener.token_ids) for listener in listeners) >= 50)
                return not any(listener.ends for listener in listeners) and listeners

            listeners = wait_until(in_the_middle)
            commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in children_of(engines[0].pid)}
            [rank] = [pid for pid, command in commands.items() if "distributed.rank_process" in command]
            os.kill(rank, signal.SIGKILL)
            assert engines[0].wait(PATIENCE_S) == 1
            engines.append(subprocess.Popen(DRAFTING_ENGINE, cwd=ROOT, env=env))
            assert [listener.wait() for listener in listeners] == ["length"] * len(listeners)
            wait_until(lambda: client.stats.get("num_drafted_tokens/mtp/1"))
    finally:
        for engine in engines:
            engine.kill()
            engine.wait()
    found = [list(zip(listener.token_ids, listener.logprobs, strict=True)) for listener in listeners]
    assert found == [expected[number] for number in range(len(requests))]


def test_ranks_die_with_the_first_however_it_ends(exported):
    graph_dir = exported("qwen2", block_size=BLOCK_SIZE, num_ranks=2)
    first = subprocess.Popen(a_group(graph_dir, 2), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert first.stdout.readline() == "ready\n"
    [rank] = children_of(first.pid)
    os.kill(rank, signal.SIGSTOP)  # it cannot see that its connection ends
    first.kill()
    first.communicate()
    wait_until(lambda: not is_alive(rank))


def test_a_process_leads_one_group_at_a_time(exported, capfd):
    """A model without other ranks may run in the same process."""
    graph_dir = exported("qwen2", block_size=BLOCK_SIZE, num_ranks=2)
    config = Config(mp_num=2, cpu_threads=1, batch_size=8, max_num_batched_tokens=17)
    requests = random_requests(seed=2)[:8]
    first = make_executor(graph_dir, config)
    first.allocate(400)
    with pytest.raises(ConfigError, match=r"MP_NUM is 2, but this process .* close\(\) that one first"):
        make_executor(graph_dir, config)
    expected = answers_of(exported("qwen2", block_size=BLOCK_SIZE), requests)
    assert tokens_of(run(first, config, requests)[0]) == tokens_of(expected)
    first.close()
    assert tokens_of(answers_of(graph_dir, requests, mp_num=2, cpu_threads=1)) == tokens_of(expected)
    assert "Traceback" not in capfd.readouterr().err


def test_a_group_that_could_not_be_made_does_not_block_the_next_one(exported, tmp_path, capfd):
    """Whichever rank has failed: the others end without a word, and the next group can be made."""
    graph_dir = exported("qwen2", block_size=BLOCK_SIZE, num_ranks=2)
    requests = random_requests(seed=2)[:2]
    for rank in range(2):
        broken = shutil.copytree(graph_dir, tmp_path / f"broken-{rank}")
        (broken / f"rank_{rank}" / "model.json").write_text("{")
        with pytest.raises(SetupError, match="is cut off or not JSON"):
            make_executor(broken, Config(mp_num=2, cpu_threads=1))
    assert len(answers_of(graph_dir, requests, mp_num=2, cpu_threads=1)) == 2
    assert "Traceback" not in capfd.readouterr().err


def a_group(graph_dir, num_ranks):
    """Return the command of a process that starts the ranks, reports it and waits."""
    code = f"""
import logging, time
from pathlib import Path
from engine.executors import expert_usage, make_executor
from engine.settings.config import Config
from engine.settings.processes import EXPERT_USAGE_FILE
logging.basicConfig()
executor = make_executor(Path({str(graph_dir)!r}), Config(mp_num={num_ranks}, cpu_threads=1))
print("ready", flush=True)
time.sleep(600)
"""
    return [sys.executable, "-c", code]
