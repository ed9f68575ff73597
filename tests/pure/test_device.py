"""Which device DEVICE means, on machines with and without torch."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest

from engine.errors import ConfigError
from engine.executors import make_executor
from engine.graph import GraphError
from engine.settings import device
from engine.settings.config import Config
from engine.settings.device import with_device


@pytest.fixture
def machine(monkeypatch):
    """Makes this machine one with these packages and GPUs."""

    def make(*packages, num_gpus=0):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in packages or None)
        cuda = SimpleNamespace(is_available=lambda: num_gpus > 0, device_count=lambda: num_gpus)
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


def test_with_a_gpu_auto_takes_it_and_cpu_does_not(machine):
    machine("torch", "triton", num_gpus=1)
    assert [with_device(Config(device=each)).device for each in ("auto", "gpu", "cpu")] == ["gpu", "gpu", "cpu"]


def test_more_ranks_than_gpus_and_gpus_of_several_machines_are_refused(machine, exported):
    graph_dir = exported("qwen2", num_ranks=4)
    machine("torch", "triton", num_gpus=3)
    with pytest.raises(ConfigError, match="MP_NUM is 4, each rank needs a GPU of its own and torch sees 3"):
        make_executor(graph_dir, Config(mp_num=4))
    with pytest.raises(
        ConfigError, match="BATCH_INVARIANT is 1 and MP_NUM 2; on GPUs only one rank keeps that promise"
    ):
        device.check_gpus(Config(mp_num=2, batch_invariant=True))
    with pytest.raises(ConfigError, match="MP_NNODE is 2; with DEVICE=gpu it must be 1"):
        device.check_gpus(Config(mp_num=2, mp_nnode=2))


def test_a_model_without_weights_is_refused_on_the_cpu(exported):
    with pytest.raises(ConfigError, match="without weights .LOAD_FORMAT=dummy.; only DEVICE=gpu draws some"):
        make_executor(exported("qwen2", load_format="dummy"), Config(device="cpu"))


def test_numbers_of_float16_are_refused_on_the_cpu(exported):
    message = "is float16, which only GPUs compute with: export with bfloat16"
    with pytest.raises(GraphError, match=message):
        make_executor(exported("qwen2", dtype="float16"), Config(device="cpu"))
