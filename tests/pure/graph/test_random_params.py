"""A model that was exported without weights runs on CPUs with random ones."""

import numpy as np
import pytest

from engine.core.loop import EngineLoop
from engine.executors import make_executor
from engine.graph import load
from engine.graph.random_params import RandomParam
from engine.ops import cpu
from engine.settings.config import Config
from tests.paged_model import PagedModel
from tests.pure.models.test_family_goldens import generate
from tests.pure.models.test_ranks import answer

PROMPT = list(range(3, 20))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"quant_type": "weight_only_int4", "dtype": "bfloat16"},
        *(pytest.param({"quant_type": name}, marks=pytest.mark.slow) for name in ("a8w8", "a8w8_fp8")),
    ],
    ids=str,
)
def test_random_weights_are_computed_with(options, exported):
    graph_dir = exported("qwen3_moe", load_format="dummy", **options)
    logits, tokens = answer(PagedModel.of(graph_dir, cpu), PROMPT)
    assert np.isfinite(logits).all() and logits.std() > 0.01
    executor = make_executor(graph_dir, Config(device="cpu", block_bs=1))
    executor.allocate(8)
    [found] = generate(EngineLoop(executor, 8, Config()), [PROMPT])
    executor.close()
    assert found[: len(tokens)] == tokens


def test_rows_of_a_random_parameter_are_those_of_the_whole(exported):
    params = load(exported("qwen3_moe", load_format="dummy", quant_type="weight_only_int8"))[1]
    drawn = [each for each in params.values() if isinstance(each, RandomParam)]
    assert drawn
    for each in drawn:
        np.testing.assert_array_equal(np.asarray(each)[3:7], each[3:7])
        assert (np.asarray(each).nbytes, np.asarray(each).dtype) == (each.nbytes, each.dtype)
