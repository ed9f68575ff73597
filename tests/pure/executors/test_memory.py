"""Tests of the number of KV blocks that fit in memory."""

from contextlib import nullcontext

import pytest

from engine.core.cache_groups import CacheGroup
from engine.errors import ConfigError
from engine.executors.distributed import ranks
from engine.executors.memory import (
    BlockSizes,
    allocate_cache,
    check_host_memory,
    free_memory_bytes,
    num_blocks,
    run_longest_step,
)
from engine.settings.config import Config
from tests.pure.counting_executor import CountingExecutor

GIB = 2**30


def blocks(model_len=1000, block_size=64, block_bytes=1024, free_bytes=GIB, **settings):
    config = Config(**{"max_dec_len": 100, **settings})
    return num_blocks(config, model_len, BlockSizes(block_size, block_bytes), free_bytes)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"block_bs": 1.0}, 16),  # ceil(1000 / 64)
        ({"block_bs": 2.5}, 40),
        ({"block_bs": 0.33}, 5),
        ({"block_bs": 1.0, "max_seq_len": 300}, 7),  # no request is longer than 400
        ({"block_bs": 1.0, "max_dec_len": 2000}, 16),  # nor than the model's 1000
    ],
)
def test_block_bs_multiplies_the_blocks_of_the_longest_request(settings, expected):
    assert blocks(**settings) == expected


def test_a_cache_that_is_too_small_for_the_longest_request_gives_a_warning(caplog):
    assert blocks(block_bs=1.0) == 16
    assert not caplog.records
    assert blocks(block_bs=0.33) == 5
    assert "the KV cache has 5 blocks. A request of the greatest length (1000 tokens) needs 16" in caplog.text


# The PaddleNLP server's table of BLOCK_BS for cards of 80 GB: weights, exported length, BLOCK_BS.
SIZES = [
    ("DeepSeek-R1/a8w8_fp8_wint4", 8192, 40),
    ("DeepSeek-R1-MTP/a8w8_fp8_wint4", 8192, 36),
    ("DeepSeek-R1/weight_only_int4", 8192, 40),
    ("DeepSeek-R1-MTP/weight_only_int4", 8192, 36),
    ("DeepSeek-R1-2nodes/a8w8_fp8", 8192, 50),
    ("DeepSeek-R1-MTP-2nodes/a8w8_fp8", 8192, 36),
    ("DeepSeek-R1-2nodes/weight_only_int8", 8192, 40),
    ("DeepSeek-R1-MTP-2nodes/weight_only_int8", 8192, 36),
    ("a model exported for 32K", 32768, 10),
]


@pytest.mark.parametrize(("weights", "exported", "block_bs"), SIZES, ids=[weights for weights, *_ in SIZES])
def test_block_bs_holds_as_many_tokens_as_the_predecessors_table_says(weights, exported, block_bs):
    """NUM_TOTAL_TOKEN = BLOCK_BS * INFER_MODEL_MAX_SEQ_LEN, of models that take prompts of the exported length."""
    tokens = block_bs * exported
    for settings in ({"max_seq_len": exported, "max_dec_len": 1024}, {"max_model_len": exported, "max_dec_len": None}):
        config = Config(block_bs=block_bs, **settings)
        assert num_blocks(config, config.model_len(exported), BlockSizes(64, 2**20), 2**40) * 64 == tokens


def test_the_predecessors_example_of_a_model_with_a_long_context_fits():
    """MAX_SEQ_LEN=8192, MAX_DEC_LEN=1024 and BLOCK_BS=5 with DeepSeek-R1-Distill-Llama-8B: 128 KiB a token."""
    config = Config(max_seq_len=8192, max_dec_len=1024, block_bs=5)
    assert num_blocks(config, 131072, BlockSizes(64, 8 * 2**20), 60 * GIB) == 5 * (8192 + 1024) // 64


def test_without_block_bs_a_share_of_the_free_memory_is_taken():
    assert blocks(free_bytes=200 * 1024) == 100
    assert blocks(free_bytes=200 * 1024, kv_cache_memory_fraction=0.1) == 20


def test_no_more_is_taken_than_a_full_batch_can_use():
    assert blocks(batch_size=4) == 64


def test_blocks_that_do_not_fit_are_refused_with_what_would():
    message = "BLOCK_BS is 4: 64 blocks need 0.5 GiB, 0.3 GiB are free; at most 2.49 fits"
    with pytest.raises(ConfigError, match=message):
        blocks(block_bs=4.0, block_bytes=8 * 2**20, free_bytes=39.9 * 8 * 2**20)
    assert blocks(block_bs=2.49, block_bytes=8 * 2**20, free_bytes=39.9 * 8 * 2**20) == 39


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_bs": 0.01}, "BLOCK_BS is 0.01, it must be larger: .* no block, a request of 1000 tokens needs 16"),
        ({"free_bytes": 1000}, "KV_CACHE_MEMORY_FRACTION is 0.5, it must be larger: of the 0.0 GiB"),
    ],
)
def test_a_pool_without_a_block_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        blocks(**settings)


ON_GPU = {"device": "gpu", "gpu_memory_utilization": 0.8}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 200),  # the executor has taken the share already
        ({"batch_size": 4}, 64),
        ({"block_bs": 2.5}, 40),
        ({"num_gpu_blocks_override": 150, "block_bs": 2.5}, 150),
    ],
)
def test_on_a_gpu_all_that_its_share_of_memory_leaves_is_taken(settings, expected):
    assert blocks(free_bytes=200 * 1024, **ON_GPU, **settings) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_gpu_blocks_override": 41}, "NUM_GPU_BLOCKS_OVERRIDE is 41: 41 blocks need 0.3 GiB, .* at most 39 fits"),
        ({"free_bytes": 0}, "GPU_MEMORY_UTILIZATION is 0.8, it must be larger: of the 0.0 GiB"),
    ],
)
def test_the_error_of_a_cache_that_does_not_fit_on_a_gpu_names_its_setting(settings, message):
    with pytest.raises(ConfigError, match=message):
        blocks(**{"block_bytes": 8 * 2**20, "free_bytes": 39.9 * 8 * 2**20, **ON_GPU, **settings})


@pytest.mark.parametrize(
    ("device", "settings", "message"),
    [
        (
            "cpu",
            {"swap_space": 0.5},
            "SWAP_SPACE is 0.5, but on the CPU the KV cache is in the host's memory itself: BLOCK_BS makes",
        ),
        ("gpu", {"swap_space": 1e6}, r"SWAP_SPACE is 1e\+06 GiB, the host has [0-9.]+ GiB free"),
        ("gpu", {"swap_space": 0.01, "experts_on_host": 0.01}, None),
        ("cpu", {}, None),
        ("cpu", {"experts_on_host": 4}, "EXPERTS_ON_HOST is 4, but on the CPU all weights are in the host's memory"),
        ("gpu", {"swap_space": 0.01, "experts_on_host": 1e6}, r"EXPERTS_ON_HOST is 1e\+06 GiB, the host has [0-9.]+ G"),
        (
            "gpu",
            {"swap_space": 1e6, "mp_num": 2, "mp_nnode": 2, "pod_ips": "127.0.0.1,10.0.0.2"},
            r"SWAP_SPACE is 1e\+06 GiB, of which 500000 on each of 2 hosts, the host has [0-9.]+ GiB free",
        ),
    ],
)
def test_host_memory_is_for_gpus_and_no_more_than_the_host_has(device, settings, message):
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        check_host_memory(Config(device=device, **settings))


def test_the_longest_step_can_be_sent_to_other_ranks():
    class Recorder(CountingExecutor):
        def launch(self, batch):
            sent = ranks.unpack_batch(ranks.unpack(ranks.pack(*batch)))
            assert sent.rows[0].new_block_ids == (tuple(range(16)),)
            return super().launch(batch)

    run_longest_step(Recorder(16, 4), Config(), 64, 16)


def test_host_memory_is_that_of_all_ranks_together():
    assert [Config(swap_space=1.5, mp_num=ranks).num_host_blocks(2**20) for ranks in (1, 2)] == [1536, 768]
    assert [Config(experts_on_host=1.5, mp_num=ranks).host_expert_bytes // 2**20 for ranks in (1, 2)] == [1536, 768]


def test_a_setting_for_gpus_changes_nothing_on_the_cpu():
    assert blocks(free_bytes=200 * 1024, num_gpu_blocks_override=7) == 100


def write(root, **files):
    for name, content in files.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


@pytest.fixture
def machine(tmp_path):
    """Return the folders of cgroup and proc of a machine with 8 GiB of available memory, outside of containers."""
    write(tmp_path, proc__meminfo=f"MemTotal: {16 * 2**20} kB\nMemAvailable:    {8 * 2**20} kB\nHugePages_Total: 0\n")
    (tmp_path / "cgroup").mkdir()
    return tmp_path / "cgroup", tmp_path / "proc"


def test_the_machine_gives_what_is_available(machine):
    assert free_memory_bytes(*machine) == 8 * GIB


@pytest.mark.parametrize(
    ("limit", "usage", "cache"),
    [
        ("memory_DOT_max", "memory_DOT_current", "inactive_file"),
        ("memory__memory_DOT_limit_in_bytes", "memory__memory_DOT_usage_in_bytes", "total_inactive_file"),
    ],
    ids=["cgroup 2", "cgroup 1"],
)
def test_a_container_gives_what_its_limit_leaves_and_its_cached_files(machine, limit, usage, cache):
    write(machine[0], **{limit: f"{6 * GIB}\n", usage: f"{4 * GIB}\n"})
    assert free_memory_bytes(*machine) == 2 * GIB
    stat = usage.rsplit("memory_DOT_", 1)[0] + "memory_DOT_stat"
    write(machine[0], **{stat: f"anon 5\n{cache} {3 * GIB}\n"})
    assert free_memory_bytes(*machine) == 5 * GIB
    write(machine[0], **{usage: f"{10 * GIB}\n"})
    assert free_memory_bytes(*machine) == 0


def test_a_container_without_a_limit_gives_what_the_machine_has(machine):
    write(machine[0], memory_DOT_max="max\n", memory_DOT_current="5\n")
    assert free_memory_bytes(*machine) == 8 * GIB


def test_this_machine_has_memory():
    assert free_memory_bytes() > 0


def test_the_memory_to_which_a_decode_instance_reads_blocks_is_not_the_caches():
    executor, settings = CountingExecutor(), {"batch_size": 1024, "max_seq_len": 2**20, "max_dec_len": 2**20}
    executor.block_bytes, executor.free_bytes = 2**20, lambda: GIB
    decode = {"splitwise_role": "decode", "prefill_instances": "10.0.0.1:7013"}
    for kv_transfer, expected in (("nixl", 448), ("tcp", 512)):  # half of 1 GiB without 128 MiB, half of 1 GiB
        assert allocate_cache(executor, Config(**settings, **decode, kv_transfer=kv_transfer), 2**21) == expected
    assert allocate_cache(executor, Config(**settings, splitwise_role="prefill", kv_transfer="nixl"), 2**21) == 512


def test_windows_need_no_more_blocks_than_they_reach():
    groups = (CacheGroup(), CacheGroup("sliding_window", 128), CacheGroup("state", num_parts=5))
    config = Config(block_bs=2, max_seq_len=4096, max_dec_len=1024, max_num_batched_tokens=64)
    count = num_blocks(config, 8192, BlockSizes(16, 1, groups), 2**40)
    assert count == 2 * ((4096 + 1024) // 16 + (128 + config.max_step_tokens - 2) // 16 + 2 + 5)
