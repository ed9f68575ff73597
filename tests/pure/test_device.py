"""Which device DEVICE means, on machines with and without torch."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest

from engine.errors import ConfigError
from engine.executors import make_executor
from engine.settings import device
from engine.settings.config import Config
from engine.settings.device import with_device


@pytest.fixture
def machine(monkeypatch):
    """Makes this machine one with these packages, and a GPU or none."""

    def make(*packages, has_gpu=False):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in packages or None)
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: has_gpu)))
        device._why_no_gpu.cache_clear()

    yield make
    device._why_no_gpu.cache_clear()


@pytest.mark.parametrize(
    ("packages", "has_gpu", "trouble"),
    [
        ([], True, "torch is missing: pip install .[cuda]"),
        (["torch"], True, "triton is missing: pip install .[cuda]"),
        (["torch", "triton"], False, "torch sees no GPU"),
    ],
)
def test_without_a_gpu_auto_is_the_cpu_and_gpu_an_error_that_says_what_is_missing(machine, packages, has_gpu, trouble):
    machine(*packages, has_gpu=has_gpu)
    assert with_device(Config()).device == "cpu"
    with pytest.raises(ConfigError) as caught:
        with_device(Config(device="gpu"))
    assert str(caught.value) == f"DEVICE is 'gpu', but {trouble}"


def test_with_a_gpu_auto_takes_it_and_cpu_does_not(machine):
    machine("torch", "triton", has_gpu=True)
    assert [with_device(Config(device=each)).device for each in ("auto", "gpu", "cpu")] == ["gpu", "gpu", "cpu"]


def test_several_ranks_on_gpus_are_refused(machine, exported):
    graph_dir = exported("qwen2", num_ranks=2)
    machine("torch", "triton", has_gpu=True)
    with pytest.raises(ConfigError, match="MP_NUM is 2; with DEVICE=gpu a model has one rank"):
        make_executor(graph_dir, Config(mp_num=2))


def test_a_model_without_weights_is_refused_on_the_cpu(exported):
    with pytest.raises(ConfigError, match="without weights .LOAD_FORMAT=dummy.; only DEVICE=gpu draws some"):
        make_executor(exported("qwen2", load_format="dummy"), Config(device="cpu"))
