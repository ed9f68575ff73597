"""The accuracy benchmark on the GPU computes what it does on the CPU."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install .[cuda]")

from benchmarks.accuracy import compare, logprobs  # noqa: E402


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("int8_cache", "bound"), [(False, 1e-3), (True, 0.05)])
def test_log_probabilities_on_a_gpu_are_those_on_a_cpu(exported, int8_cache, bound):
    """The CPU rounds the weights of an int8 cache's values to 16 bits."""
    graph_dir, texts = exported("qwen2", int8_cache=int8_cache), [list(range(3, 90)), [7, 8]]
    exact, found = (list(logprobs(graph_dir, texts, device)) for device in ("cpu", "gpu"))
    assert [len(each) for each in found] == [87, 2]
    assert compare(exact, found)["largest_error"] < bound
    assert np.isfinite(found[0]).all()
