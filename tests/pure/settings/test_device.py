"""Tests of the device that DEVICE selects, on machines with and without torch."""

import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.errors import ConfigError
from engine.executors import make_executor
from engine.graph import GraphError
from engine.settings import device
from engine.settings.config import Config
from engine.settings.device import check_packages, with_device

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def machine(monkeypatch):
    """Return a function that simulates a machine with these packages and GPUs."""

    def make(*packages, num_gpus=0, capabilities=((9, 0),) * 8):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in packages or None)
        cuda = SimpleNamespace(
            is_available=lambda: num_gpus > 0,
            device_count=lambda: num_gpus,
            get_device_capability=lambda index: capabilities[index],
            get_device_name=lambda index: "Tesla T4",
        )
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
        device._why_no_gpu.cache_clear()

    yield make
    device._why_no_gpu.cache_clear()


@pytest.mark.parametrize(
    ("packages", "num_gpus", "trouble"),
    [
        ([], 1, "torch is missing: pip install .[cuda]"),
        (["torch"], 1, "triton is missing: pip install .[cuda]"),
        (["torch", "triton"], 0, "torch sees no GPU"),
    ],
)
def test_without_a_gpu_auto_is_the_cpu_and_gpu_an_error_that_says_what_is_missing(machine, packages, num_gpus, trouble):
    machine(*packages, num_gpus=num_gpus)
    assert with_device(Config()).device == "cpu"
    with pytest.raises(ConfigError) as caught:
        with_device(Config(device="gpu"))
    assert str(caught.value) == f"DEVICE is 'gpu', but {trouble}"


def test_a_gpu_that_is_too_old_is_refused_with_the_capability_that_is_needed(machine):
    machine("torch", "triton", num_gpus=2, capabilities=[(7, 5), (8, 0)])
    assert with_device(Config()).device == "cpu"
    message = r"GPU 0, Tesla T4, has compute capability 7\.5, 8\.0 or more is needed \(docs/gpu\.md\)"
    with pytest.raises(ConfigError, match=message):
        with_device(Config(device="gpu"))
    machine("torch", "triton", num_gpus=2, capabilities=[(8, 0), (7, 0)])
    assert with_device(Config()).device == "gpu"
    with pytest.raises(ConfigError, match=r"MP_NUM is 2, but GPU 1, Tesla T4, has compute capability 7\.0"):
        device.check_gpus(Config(mp_num=2))


def test_the_documentation_names_the_compute_capability_that_is_checked():
    needed = ".".join(map(str, device.MIN_CAPABILITY))
    assert f"| below {needed} |" in (ROOT / "docs/gpu.md").read_text()
    assert f"compute capability {needed} or higher" in (ROOT / "README.md").read_text()


def test_with_a_gpu_auto_takes_it_and_cpu_does_not(machine):
    machine("torch", "triton", num_gpus=1)
    assert [with_device(Config(device=each)).device for each in ("auto", "gpu", "cpu")] == ["gpu", "gpu", "cpu"]


def test_more_ranks_than_gpus_are_refused_and_a_machine_counts_its_own(machine, exported):
    graph_dir = exported("qwen2", num_ranks=4)
    machine("torch", "triton", num_gpus=3)
    with pytest.raises(ConfigError, match="MP_NUM is 4, each rank needs a GPU of its own and torch sees 3"):
        make_executor(graph_dir, Config(mp_num=4))
    with pytest.raises(
        ConfigError, match="BATCH_INVARIANT is 1 and MP_NUM 2; on GPUs only one rank keeps that promise"
    ):
        device.check_gpus(Config(mp_num=2, batch_invariant=True))
    second = {"mp_nnode": 2, "pod_ips": "10.0.0.1,10.0.0.2", "host_ip": "10.0.0.2"}
    device.check_gpus(Config(mp_num=6, **second))
    message = "MP_NUM is 8 and MP_NNODE 2, each of the 4 ranks on 10.0.0.2 needs a GPU of its own and torch sees 3"
    with pytest.raises(ConfigError, match=message):
        device.check_gpus(Config(mp_num=8, **second))


@pytest.mark.parametrize(("listed", "expected"), [("", "2,3"), ("7,1,GPU-a,4,5", "GPU-a,4")])
def test_each_engine_takes_gpus_of_its_own(machine, monkeypatch, listed, expected):
    machine("torch", "triton", num_gpus=5)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    device.take_gpus(Config(data_parallel_size=2, mp_num=2, engine_index=1, device="cpu"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == listed
    device.take_gpus(Config(data_parallel_size=2, mp_num=2, engine_index=1))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
    message = "DATA_PARALLEL_SIZE is 3 and MP_NUM 2: each of the 6 ranks needs a GPU of its own and torch sees 5"
    with pytest.raises(ConfigError, match=message):
        device.take_gpus(Config(data_parallel_size=3, mp_num=2))


def test_numbers_of_float16_are_refused_on_the_cpu(exported):
    message = "is float16, which only GPUs compute with: export with bfloat16"
    with pytest.raises(GraphError, match=message):
        make_executor(exported("qwen2", dtype="float16"), Config(device="cpu"))


def test_a_start_on_a_gpu_is_refused_before_anything_is_exported_where_packages_are_missing(machine):
    machine("triton")
    with pytest.raises(ConfigError, match="^DEVICE is 'gpu', but torch is missing: pip install"):
        check_packages(Config(device="gpu"))
    check_packages(Config(device="auto"))
    machine("torch", "triton")
    check_packages(Config(device="gpu"))
