"""EXPERTS_ON_HOST: experts in the host's memory change no bit, in steps that read them in place or copy them."""

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install .[cuda]")

from engine import graph  # noqa: E402
from engine.core.loop import EngineLoop  # noqa: E402
from engine.core.types import Request, Sampling  # noqa: E402
from engine.errors import ConfigError  # noqa: E402
from engine.executors.cuda import host_experts  # noqa: E402
from engine.executors.cuda.executor import CudaExecutor  # noqa: E402
from engine.executors.cuda.step_graphs import StepGraphs  # noqa: E402
from engine.graph.experts import expert_sizes  # noqa: E402
from engine.ops import cuda  # noqa: E402
from engine.ops.cuda import invariant, offloaded_experts  # noqa: E402
from engine.ops.cuda.forward_context import forward_pass  # noqa: E402
from engine.ops.cuda.offloaded_experts import OffloadedMatrix, Stage  # noqa: E402
from tests.cuda.arrays import floats, tensor  # noqa: E402
from tests.cuda.conftest import IS_INTERPRETED  # noqa: E402
from tests.cuda.test_executor import SETTINGS, answers_of  # noqa: E402
from tests.cuda.test_experts import KINDS, SILU, op_of, packed, stacked  # noqa: E402

NUM_EXPERTS, WIDTH, INNER, NUM_BLOCKS = 5, 96, 32, 16
SHAPES = (2 * INNER, WIDTH), (WIDTH, INNER)  # rows and columns of gate and up, and of down
IN_PLACE = 4 if IS_INTERPRETED else offloaded_experts.IN_PLACE


@pytest.fixture(autouse=True)
def _only_short_steps_read_in_place(monkeypatch):
    monkeypatch.setattr(offloaded_experts, "IN_PLACE", IN_PLACE)


def offloaded(whole, on_host):
    """Return a matrix whose last `on_host` experts are on the host."""
    parts = whole.chunk(NUM_EXPERTS)
    kept = len(parts) - on_host
    on_device = torch.cat([parts[0][:0], *parts[:kept]])
    others = [part.cpu().pin_memory() if part.is_cuda else part.clone() for part in parts[kept:]]
    return OffloadedMatrix(on_device, others, range(NUM_EXPERTS))


@pytest.mark.usefixtures("products_are_chains_of_sums")
@pytest.mark.parametrize("kind", KINDS)
def test_products_have_the_same_bits_wherever_experts_are(device, kind):
    """Two layers; one has all experts on the host. Experts change places between two rounds of steps."""
    rng, dtype = np.random.default_rng(0), torch.float32 if IS_INTERPRETED else torch.bfloat16
    names = [op_of(name, kind) for name in ("expert_gate_up", "expert_down")]
    layers = [
        [packed(kind, stacked(kind, rng, NUM_EXPERTS, *shape), device, dtype) for shape in SHAPES] for _ in range(2)
    ]
    matrices = [
        offloaded(arrays[0], on_host) for layer, on_host in zip(layers, (2, 5), strict=True) for arrays in layer
    ]
    stage = Stage(matrices, torch.device(device))
    for num_rows, top_k in ((1, 3), (IN_PLACE, 2), (IN_PLACE + 1, 2), (1, 2), (IN_PLACE + 2, 1)):
        chosen = np.argsort(rng.random((num_rows, NUM_EXPERTS)), axis=1)[:, :top_k].astype(np.int32)
        chosen[0, 0] = 7  # an expert of another rank
        x = tensor(floats(rng, num_rows, WIDTH), device).to(dtype)
        weights = tensor(floats(rng, num_rows, top_k), device)
        for ops in (cuda, invariant) if hasattr(invariant, names[0]) else (cuda,):
            for number, layer in enumerate(layers):
                own = [[matrix, *arrays[1:]] for matrix, arrays in zip(matrices[2 * number :], layer, strict=False)]
                found = []
                for gate_up, down in (layer, own):
                    ids = tensor(chosen, device)
                    with forward_pass():
                        h = getattr(ops, names[0])(x, ids, *gate_up, num_experts=NUM_EXPERTS, **SILU)
                        h.view(num_rows, top_k, -1)[0, 0] = 0
                        y = getattr(ops, names[1])(h, ids, weights, *down, num_experts=NUM_EXPERTS)
                    found.append((h, y))
                assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
        if num_rows == IN_PLACE + 1:
            for number in (0, 1):
                stage.swap(number, 1, 0)
            assert matrices[0].experts == matrices[1].experts == [0, 3, 2, 1, 4]


CASES = {
    "batch invariant": ({}, {"batch_invariant": True}),
    "int8": ({"quant_type": "weight_only_int8"}, {}),
}


@pytest.mark.usefixtures("products_are_chains_of_sums")
@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_a_server_with_all_experts_on_the_gpu(exported, device, monkeypatch, case):
    """Prompts are longer and shorter than what is read in place; experts change places while requests decode."""
    monkeypatch.setattr(host_experts, "INTERVAL", 1)
    monkeypatch.setattr(host_experts, "MIN_RATIO", 0)
    rng, count, (options, settings) = np.random.default_rng(3), 5 if IS_INTERPRETED else 60, CASES[case]
    prompts = [rng.integers(0, 300, length).tolist() for length in (IN_PLACE + 2, 3)]
    model, found = exported("qwen3_moe", "float32" if IS_INTERPRETED else "bfloat16", **options), []
    sizes = expert_sizes(graph.load(model)[0])
    for share in (0, 0.4):
        config = dataclasses.replace(SETTINGS, **settings, experts_on_host=share * sizes.num_bytes / 2**30)
        executor = CudaExecutor(model, config, device.type)
        executor.allocate(NUM_BLOCKS)
        fields = {"max_new_tokens": count, "temperature": 0, "num_logprobs": 3}
        requests = [Request(str(n), list(each), len(each), Sampling(**fields)) for n, each in enumerate(prompts)]
        found.append(answers_of(EngineLoop(executor, NUM_BLOCKS, config), requests))
        if share:
            matrices = executor.runner.host_experts.matrices
            assert sum(len(each.on_host) for each in matrices) == 2 * int(0.4 * sizes.num_experts * sizes.num_layers)
            assert any(each.experts != sorted(each.experts) for each in matrices)
        executor.close()
    assert found[0] == found[1]


def test_settings_that_leave_no_expert_on_the_host_are_refused(exported, device):
    few, some = (dataclasses.replace(SETTINGS, experts_on_host=gib) for gib in (1e-9, 1))
    with pytest.raises(ConfigError, match="EXPERTS_ON_HOST is 9.3e-10 GiB per rank, it must be 0 or at least"):
        CudaExecutor(exported("qwen3_moe"), few, device.type)
    with pytest.raises(ConfigError, match="EXPERTS_ON_HOST is set, but the model has no experts"):
        CudaExecutor(exported("qwen2"), some, device.type)


def test_only_steps_that_read_in_place_are_captured():
    settings = {"batch_size": 128, "cudagraph_capture_sizes": "1,64,96", "speculate_method": "ngram"}
    sizes = []
    for experts_on_host in (0, 1):
        config = dataclasses.replace(SETTINGS, experts_on_host=experts_on_host, max_num_batched_tokens=512, **settings)
        graphs = StepGraphs(config, 16, torch.device("cuda"))
        shapes = (*graphs._decodes, *graphs._prompts, *graphs._verifying)
        sizes.append({shape.num_tokens for shape in shapes})
    assert sizes[1] == {size for size in sizes[0] if size <= 64} and len(sizes[0]) > len(sizes[1])
