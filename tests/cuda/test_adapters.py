"""LoRA adapters on the GPU: what they add to a product, and the answers of checkpoints that they were merged into."""

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install .[cuda]")

from engine.core.loop import EngineLoop  # noqa: E402
from engine.core.types import Request, Sampling  # noqa: E402
from engine.errors import InvalidRequest  # noqa: E402
from engine.executors.cuda.executor import CudaExecutor  # noqa: E402
from engine.executors.reference import ReferenceExecutor  # noqa: E402
from engine.models.adapters import identified  # noqa: E402
from engine.ops.cuda.adapters import Layer, add_adapters, groups_of  # noqa: E402
from tests.cuda.arrays import array, tensor  # noqa: E402
from tests.cuda.conftest import IS_INTERPRETED  # noqa: E402
from tests.cuda.test_executor import SETTINGS, golden_cases  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # the interpreter tells of it


@pytest.mark.parametrize("num_rows", [1, 3, 50])
def test_each_row_gains_what_its_adapter_says(device, num_rows):
    """Three parts are stacked, two of which have odd sizes, and some rows have no adapter."""
    rng = np.random.default_rng(num_rows)
    sizes, width, num_slots, rank = [150, 7, 30], 1100, 4, 5
    layer = Layer.empty(sizes, width, (num_slots, rank), torch.zeros(1, device=device))
    a = rng.standard_normal((num_slots, 3, rank, width)).astype(np.float32)
    b = rng.standard_normal((num_slots, sum(sizes), rank)).astype(np.float32)
    layer.a[:, :, :rank], layer.b[:, :, :rank] = tensor(a, device), tensor(b, device)
    x, y = (rng.standard_normal((num_rows, size)).astype(np.float32) for size in (width, sum(sizes)))
    slots = rng.integers(-1, num_slots, num_rows)
    slots[0] = 2
    groups = groups_of(slots, num_rows + 7, num_slots)  # as if the step was filled up with padding rows
    found = tensor(y, device)
    add_adapters(found, tensor(x, device), layer, tensor(groups, device))
    for row, slot in enumerate(slots):
        if slot >= 0:
            inner = a[slot] @ x[row]
            y[row] += np.concatenate([part @ h for part, h in zip(np.split(b[slot], [150, 157]), inner, strict=True)])
    assert np.abs(array(found) - y).max() < 1e-5 * np.abs(y).max()


def answers(loop, requests):
    asked = [
        Request(
            str(n), list(prompt), len(prompt), Sampling(4 if IS_INTERPRETED else 24, temperature=0, adapter=adapter)
        )
        for n, (prompt, adapter) in enumerate(requests)
    ]
    for request in asked:
        if request.sampling.adapter:
            loop.adapters.ensure_loaded(request.sampling.adapter)
        loop.add(request)
    while not loop.is_idle:
        loop.step()
    return [request.token_ids[request.prompt_len :] for request in asked]


def of_definition(graph_dir, prompts):
    oracle = ReferenceExecutor(graph_dir)
    oracle.allocate(32)
    return answers(EngineLoop(oracle, 32, SETTINGS), [(prompt, ()) for prompt in prompts])


def test_the_tokens_are_those_of_merged_checkpoints_whatever_requests_are_beside_them(adapted, device):
    """Requests with one adapter, with the other and with none are in the same steps; then others are in the same
    slots.
    """
    graphs, adapters = adapted
    prompts = [prompt for prompt, _ in golden_cases("qwen2", [7, 65]).values()]
    wanted = [of_definition(graph_dir, prompts) for graph_dir in graphs]
    assert wanted[0] != wanted[1] != wanted[2] != wanted[0]
    config = dataclasses.replace(SETTINGS, lora_dir="/adapters", max_loras=2)
    executor = CudaExecutor(graphs[0], config, device.type)
    executor.allocate(64)
    loop = EngineLoop(executor, 64, config)
    of_each = [(), *adapters]
    asked = [(prompt, adapter) for prompt in prompts for adapter in of_each]
    expected = [wanted[which][at] for at in range(len(prompts)) for which in range(3)]
    assert answers(loop, asked) == expected
    for adapter in adapters:
        executor.drop_adapter(adapter[0])
    for adapter in reversed(adapters):  # each in the slot of the other
        executor.load_adapter(adapter)
    assert answers(loop, asked[:3]) == expected[:3]


def test_files_that_are_no_adapter_are_refused_and_leave_nothing(adapted, device, tmp_path):
    graphs, adapters = adapted
    executor = CudaExecutor(graphs[0], dataclasses.replace(SETTINGS, lora_dir="/adapters", max_loras=1), device.type)
    tmp_path.joinpath("adapter_config.json").write_text('{"peft_type": "LORA", "r": 64, "lora_alpha": 1}')
    tmp_path.joinpath("adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(InvalidRequest, match="r is 64, at most MAX_LORA_RANK"):
        executor.load_adapter(identified(tmp_path))
    executor.load_adapter(adapters[0])
