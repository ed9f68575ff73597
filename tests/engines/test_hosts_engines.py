"""Two machines, as engines of this one at 127.0.0.1 and 127.0.0.2: the same tokens, and what ends them."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from engine.core.types import Sampling
from engine.errors import HostLost
from engine.executors import make_executor
from engine.exporting.export import ExportOptions, export
from engine.link.journal import JournalEntry, Submission
from engine.link.messages import STARTING
from engine.settings.config import Config
from tests.checkpoints import make_checkpoint
from tests.mtp_checkpoints import make_mtp_checkpoint, make_right
from tests.patience import PATIENCE_S, wait_until
from tests.pure.engine_helpers import DRAFTING_ENGINE, ROOT, Collector, a_client
from tests.pure.executors.test_batch_invariance import run
from tests.server import free_ports

PROMPTS = [[n, n + 1, n + 2] for n in range(5, 45, 10)]


class Engines:
    """The engine's process of each host, as its supervisor starts it."""

    def __init__(self, folder, graph_dirs, num_ranks, **env):
        self._folder, self._graph_dirs = folder, graph_dirs
        [node_port] = free_ports(1)
        self._env = {"MP_NNODE": "2", "MP_NUM": str(num_ranks), "POD_IPS": "127.0.0.1,127.0.0.2", "CPU_THREADS": "1"}
        self._env |= {"POD_0_IP": "127.0.0.1", "INTER_NODE_PORT": str(node_port), "BLOCK_BS": "8", **env}
        self.processes = {}
        self.command = [sys.executable, "-m", "engine.process"]

    def address(self, host=0):
        return f"ipc://{self._run_dir(host)}/engine.sock"

    def _run_dir(self, host):
        folder = self._folder / f"run{host}"
        folder.mkdir(exist_ok=True)
        return folder

    def start(self, host, **env):
        settings = {"HOST_IP": f"127.0.0.{host + 1}", "RUN_DIR": str(self._run_dir(host))}
        settings |= {"GRAPH_DIR": str(self._graph_dirs[host]), **env}
        with (self._folder / f"{host}.log").open("a") as log:
            self.processes[host] = subprocess.Popen(
                self.command, cwd=ROOT, env={**os.environ, **self._env, **settings}, stdout=log, stderr=log
            )

    def log(self, host):
        return (self._folder / f"{host}.log").read_text()

    def kill(self, host):
        self.processes[host].kill()
        self.wait(host)

    def wait(self, host):
        return self.processes[host].wait(PATIENCE_S)


@contextmanager
def running_engines(*args, **env):
    both = Engines(*args, **env)
    try:
        yield both
    finally:
        for process in both.processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def engines(tmp_path, exported, request):
    num_ranks = getattr(request, "param", 2)
    own = [range(0, num_ranks // 2), range(num_ranks // 2, num_ranks)]
    graph_dirs = [exported("qwen2", block_size=16, num_ranks=num_ranks, ranks=tuple(ranks)) for ranks in own]
    with running_engines(tmp_path, graph_dirs, num_ranks) as both:
        yield both


@pytest.fixture(scope="module")
def expected(exported):
    """Return the answers of one process to PROMPTS."""
    config = Config(block_bs=8)
    executor = make_executor(exported("qwen2", block_size=16), config)
    executor.allocate(400)
    answers, _ = run(executor, config, [(prompt, sampling_of(n)) for n, prompt in enumerate(PROMPTS)])
    executor.close()
    return [[token_id for token_id, _ in answers[n]] for n in range(len(PROMPTS))]


def sampling_of(number):
    return Sampling(600, temperature=number % 2, seed=number, num_logprobs=1)


def ask_all(client):
    listeners = []
    for number, prompt in enumerate(PROMPTS):
        listeners.append(Collector())
        submission = Submission(f"request {number} {time.monotonic()}", sampling_of(number), listeners[-1])
        client.submit(JournalEntry.of(prompt, [submission]))
    return listeners


def answers_of(listeners):
    assert [listener.wait() for listener in listeners] == ["length"] * len(listeners)
    return [listener.token_ids for listener in listeners]


def ask_until_in_the_middle(client):
    """Return the listeners of requests that have some of their tokens and have not ended, as they may have on a fast
    machine.
    """

    def attempt():
        listeners = ask_all(client)
        wait_until(lambda: min(len(listener.token_ids) for listener in listeners) >= 50)
        return not any(listener.ends for listener in listeners) and listeners

    return wait_until(attempt)


@contextmanager
def both_running(engines):
    with a_client(engines.address()) as client:
        engines.start(0)
        engines.start(1)
        yield client


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("engines", "first"),
    [pytest.param(2, 0, id="one rank each, master first"), pytest.param(4, 1, id="two ranks each, follower first")],
    indirect=["engines"],
)
def test_two_hosts_choose_the_tokens_of_one_whichever_starts_first(engines, first, expected):
    with a_client(engines.address()) as client, a_client(engines.address(1)) as follower:
        listeners = ask_all(client)  # they wait
        engines.start(first)
        awaited = [client, follower][first]
        reason = ["waits for 127.0.0.2", "waits for 127.0.0.1, which serves"][first]
        wait_until(lambda: awaited.stats.get(STARTING) == reason)
        engines.start(1 - first)
        assert answers_of(listeners) == expected
        wait_until(lambda: follower.stats.get(STARTING) == "")


@pytest.mark.parametrize("engines", [4], indirect=True)
def test_a_follower_that_is_killed_ends_the_master_and_with_another_one_everything_goes_on(engines, expected):
    with both_running(engines) as client:
        listeners = ask_until_in_the_middle(client)
        engines.kill(1)
        assert engines.wait(0) == HostLost.exit_status
        assert "127.0.0.2 has ended or cannot be reached; the engine starts anew and waits for it" in engines.log(0)
        engines.start(0)
        wait_until(lambda: client.stats.get(STARTING) == "waits for 127.0.0.2")
        engines.start(1)
        assert answers_of(listeners) == expected


@pytest.mark.thorough
def test_with_an_mtp_layer_everything_goes_on_with_another_follower(tmp_path):
    """The first answers are given without drafts, by engines that know nothing of the layer."""
    checkpoint = make_right(make_mtp_checkpoint(tmp_path / "checkpoint", "glm4_moe"), "glm4_moe")
    graph_dir, expected = tmp_path / "out", None
    export(checkpoint, graph_dir, ExportOptions(block_size=16, mtp=True, num_ranks=4))
    for env in ({}, {"SPECULATE_METHOD": "mtp"}):
        folder = tmp_path / env.get("SPECULATE_METHOD", "none")
        folder.mkdir()
        with running_engines(folder, [graph_dir] * 2, 4, **env) as engines:
            engines.command = DRAFTING_ENGINE
            with both_running(engines) as client:
                if expected is None:
                    expected = answers_of(ask_all(client))
                    continue
                listeners = ask_until_in_the_middle(client)
                engines.kill(1)
                assert engines.wait(0) == HostLost.exit_status
                engines.start(0)
                engines.start(1)
                assert answers_of(listeners) == expected
                wait_until(lambda: client.stats.get("num_drafted_tokens/mtp/1"))


def test_a_master_that_is_killed_ends_the_follower_and_everything_goes_on(engines, expected):
    with both_running(engines) as client:
        listeners = ask_until_in_the_middle(client)
        engines.kill(0)
        assert engines.wait(1) == HostLost.exit_status
        engines.start(1)
        engines.start(0)
        assert answers_of(listeners) == expected


@pytest.mark.sampled(2)
@pytest.mark.parametrize("victim", [0, 1])
def test_hosts_that_are_idle_notice_the_end_of_the_other(engines, victim):
    with both_running(engines) as client:
        wait_until(lambda: client.stats.get("num_blocks"))
        engines.kill(victim)
        assert engines.wait(1 - victim) == HostLost.exit_status


def test_an_end_that_was_asked_for_is_no_error(engines):
    with both_running(engines) as client:
        wait_until(lambda: client.stats.get("num_blocks"))
        engines.processes[0].send_signal(signal.SIGTERM)
        assert engines.wait(0) == 0
        assert "ERROR" not in engines.log(0)
        assert engines.wait(1) == HostLost.exit_status
        engines.start(1)
        engines.start(0)
        with a_client(engines.address(1)) as follower:
            wait_until(lambda: follower.stats.get(STARTING) == "")
        engines.processes[1].send_signal(signal.SIGTERM)
        assert engines.wait(1) == 0


def test_a_host_with_other_weights_is_refused_and_says_why(engines, tmp_path):
    engines.start(0)
    other = tmp_path / "other"
    export(make_checkpoint(tmp_path / "checkpoint", "qwen2", seed=99), other, ExportOptions(block_size=16, num_ranks=2))
    engines.start(1, GRAPH_DIR=str(other))
    assert engines.wait(1) == 1
    assert "127.0.0.1, which serves, refuses 127.0.0.2: the hash of manifest.json and config.json is" in engines.log(1)
    assert engines.processes[0].poll() is None
    engines.start(1)
    with a_client(engines.address()) as client:
        wait_until(lambda: client.stats.get("num_blocks"))


def test_a_host_without_its_ranks_says_which_are_missing(engines, exported):
    engines.start(1, GRAPH_DIR=str(exported("qwen2", block_size=16, num_ranks=2, ranks=(0,))))
    assert engines.wait(1) == 1
    assert "rank_1/model.json is missing" in engines.log(1)


def test_a_follower_that_cannot_load_its_rank_is_no_crash_of_the_master(engines, tmp_path):
    broken = tmp_path / "broken"
    subprocess.run(["cp", "-r", engines._graph_dirs[1], broken], check=True)
    program = broken / "rank_1" / "model.json"
    program.write_text(program.read_text()[:1000])
    engines.start(0)
    engines.start(1, GRAPH_DIR=str(broken))
    assert engines.wait(1) not in (0, HostLost.exit_status)
    assert engines.wait(0) == HostLost.exit_status
