"""Vision networks on the GPU: their ops against the definition, and answers to prompts with images against
transformers."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install .[cuda]")

from engine.core.loop import EngineLoop  # noqa: E402
from engine.executors import make_host  # noqa: E402
from engine.executors.cuda.executor import CudaExecutor  # noqa: E402
from engine.ops import cuda, reference  # noqa: E402
from engine.ops.cuda.vision import QueryTiles, query_tiles  # noqa: E402
from engine.settings.config import Config  # noqa: E402
from tests.cuda.arrays import Ops, array, assert_close, distance, floats, tensor  # noqa: E402
from tests.cuda.conftest import IS_INTERPRETED  # noqa: E402
from tests.golden_arrays import golden  # noqa: E402
from tests.images import MODEL_TYPES, PROMPTS  # noqa: E402
from tests.pure.images.test_image_models import a_request, answers_of  # noqa: E402
from tests.pure.ops.test_vision import SHAPES, attention_inputs  # noqa: E402


@pytest.fixture(scope="module")
def ops(device):
    return Ops(device)


@pytest.mark.parametrize("shape", SHAPES)
def test_bidirectional_attention(ops, device, products_are_chains_of_sums, shape):
    inputs, given = attention_inputs(*shape), {"num_heads": shape[0], "scale": 2 * shape[1] ** -0.5, "is_bf16": 0}
    expected = reference.bidirectional_attention(*inputs, **given)
    assert_close(ops.bidirectional_attention(*inputs, **given), expected, 1e-5)
    qkv, cos_sin = (tensor(each, device) for each in inputs[:2])
    tiles = QueryTiles(tensor(query_tiles(inputs[2]), device))
    assert_close(array(cuda.bidirectional_attention(qkv, cos_sin, tiles, **given)), expected, 1e-5)
    found = cuda.bidirectional_attention(qkv.bfloat16(), cos_sin, tiles, **given)
    assert found.dtype == torch.bfloat16 and distance(found, expected) < 0.02


def test_windows_of_different_lengths(ops):
    """The right edge of an image has smaller windows."""
    inputs, given = attention_inputs(2, 16, [8, 16, 20, 28, 36, 40, 42, 44, 45]), {"num_heads": 2, "scale": 0.3}
    expected = reference.bidirectional_attention(*inputs, **given, is_bf16=0)
    assert_close(ops.bidirectional_attention(*inputs, **given, is_bf16=0), expected, 1e-5)


def test_other_ops(ops):
    rng = np.random.default_rng(0)
    x, rows = floats(rng, 9, 70), rng.integers(0, 9, (5, 4)).astype(np.int32)
    weights = floats(rng, 5, 4)
    assert_close(ops.interpolate_rows(x, rows, weights), reference.interpolate_rows(x, rows, weights))
    assert np.array_equal(ops.concat_rows(x, rows), reference.concat_rows(x, rows))
    assert_close(ops.gelu_erf(4 * x), reference.gelu_erf(4 * x))


@pytest.mark.parametrize("family", MODEL_TYPES)
def test_the_tower_computes_the_embeddings_of_transformers(family, device, exported):
    """Its patches are those of the image processor, in the order of its windows."""
    executor, expected = (
        CudaExecutor(exported(family, block_size=16), Config(), device=device.type),
        golden(f"images/{family}"),
    )
    encoder = executor.vision
    for number in range(len(PROMPTS)):
        found = []
        for span in a_request(family, number).spans:
            assert np.array_equal(array(encoder._inputs(span)["patches"]), encoder._images.of(span)["patches"])
            encoder.begin(span)
            embeddings = encoder.advance().result().embeddings
            found.append(np.frombuffer(embeddings, np.float32).reshape(span.length, -1))
        np.testing.assert_allclose(np.concatenate(found), expected[f"embeddings_{number}"], rtol=2e-3, atol=5e-3)
    executor.close()


def test_a_model_that_takes_text_only_loads_no_tower(device, exported):
    executor = CudaExecutor(exported("paddleocr_vl", block_size=16), Config(enable_mm=False), device=device.type)
    assert executor.vision is None
    executor.close()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("family", MODEL_TYPES)
def test_answers_are_those_of_transformers(family, num_ranks, exported, request):
    """All prompts at once, then in chunks that end inside images."""
    device = request.getfixturevalue("device" if num_ranks == 1 else "two_devices")
    if num_ranks == 2 and IS_INTERPRETED:
        pytest.skip("takes minutes with the interpreter")
    expected, settings = (
        golden(f"images/{family}"),
        {"batch_size": 4, "block_ratio": 0.99, "mp_num": num_ranks, "device": "gpu"},
    )
    graph_dir = exported(family, **{"num_ranks": 2} if num_ranks == 2 else {}, block_size=16)
    for sizes in ({}, {"max_num_batched_tokens": 5}):
        config = Config(**settings, **sizes)
        executor = CudaExecutor(graph_dir, config, device.type) if num_ranks == 1 else make_host(graph_dir, config)
        executor.allocate(100)
        found = answers_of(EngineLoop(executor, 100, config), [a_request(family, n) for n in range(len(PROMPTS))])
        for number in range(len(PROMPTS)):
            assert found[str(number)][0] == expected[f"tokens_{number}"].tolist()
        executor.close()
