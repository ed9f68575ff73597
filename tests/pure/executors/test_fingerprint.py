"""Fingerprints: equal for equal arithmetic, different for kernels or ranks that round differently."""

import os
import subprocess
import sys

import pytest

from engine.executors import make_executor
from engine.executors.fingerprint import NUM_DECODES, PROMPT_LEN, fingerprint
from engine.executors.memory import allocate_cache
from engine.exporting.manifest import Manifest
from engine.settings.config import Config
from tests.server import ROOT

PROGRAM = """
import sys
from pathlib import Path
from tests.pure.executors.test_fingerprint import fingerprint_of
print(fingerprint_of(Path(sys.argv[1])))
"""


def fingerprint_of(graph_dir, least=0, **settings):
    """Return the fingerprint with a new executor whose cache has `least` blocks, or as many as it gets."""
    config, model = Config(block_bs=8, batch_size=4, **settings), Manifest.read(graph_dir)
    executor = make_executor(graph_dir, config, owns_process=False)
    try:
        num_blocks = allocate_cache(executor, config, model.max_seq_len)
        bounds = model.max_seq_len, config.max_step_tokens, least or num_blocks
        return fingerprint(executor, model.vocab_size, bounds)
    finally:
        executor.close()


def in_process(graph_dir, **env):
    """Return the fingerprint of another process, as the kernels of one cannot be changed."""
    command = [sys.executable, "-c", PROGRAM, str(graph_dir)]
    return int(subprocess.run(command, env={**os.environ, **env}, cwd=ROOT, check=True, capture_output=True).stdout)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_next"])  # the latter has states
def test_the_fingerprint_depends_on_the_model_and_neither_on_threads_nor_on_the_steps_of_the_prompt(exported, family):
    graph_dir = exported(family, block_size=16)
    found = fingerprint_of(graph_dir)
    assert 0 < found < 1 << 48
    assert fingerprint_of(graph_dir, cpu_threads=1, max_num_batched_tokens=24) == found
    if family != "qwen2":
        assert fingerprint_of(exported("qwen2", block_size=16)) != found


@pytest.mark.slow
def test_two_ranks_add_in_another_order_and_have_another_fingerprint(exported):
    one, two = exported("qwen2", block_size=16), exported("qwen2", block_size=16, num_ranks=2)
    found = fingerprint_of(two, mp_num=2)
    assert found not in (0, fingerprint_of(one)) and fingerprint_of(two, mp_num=2) == found


@pytest.mark.slow
def test_the_fingerprint_tells_instruction_sets_apart(exported):
    graph_dir = exported("qwen2", block_size=16)
    portable = in_process(graph_dir, CPU_ISA="portable")
    assert portable == in_process(graph_dir, CPU_ISA="portable") != fingerprint_of(graph_dir)


def test_a_cache_or_a_model_that_is_too_small_has_no_fingerprint(exported):
    graph_dir = exported("qwen2", block_size=16)
    needed = -(-(PROMPT_LEN + NUM_DECODES) // 16)
    assert fingerprint_of(graph_dir, least=needed - 1) == 0 < fingerprint_of(graph_dir, least=needed)
