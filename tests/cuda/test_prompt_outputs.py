"""Tests of prompt outputs on the GPU, which must be those of transformers, as on the CPU."""

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install .[cuda]")

from engine.core.types import Sampling  # noqa: E402
from tests.cuda.conftest import IS_INTERPRETED  # noqa: E402
from tests.cuda.test_executor import FAMILIES, a_loop, golden_cases  # noqa: E402
from tests.golden_arrays import golden  # noqa: E402
from tests.prompt_outputs import READ_LEN, a_request, check_like_transformers, requests_of, run  # noqa: E402


@pytest.mark.parametrize("family", ["llama", "qwen2"] if IS_INTERPRETED else FAMILIES)
def test_scores_and_hidden_states_are_those_of_transformers(exported, device, family):
    """The prompts run in chunks that fill no block, next to one another and an answer, and again with a prefix cache
    that has all of them.
    """
    [(prompt, _)] = golden_cases(family, [READ_LEN]).values()
    expected_outputs = golden("prompt_outputs")
    loop = a_loop(exported(family), device, max_num_batched_tokens=29)
    loop.scheduler.limits = dataclasses.replace(loop.scheduler.limits, max_prompt_logits=23)
    other = a_request("other", prompt[:3], Sampling(12, temperature=0.8, seed=1))
    _, outputs, _ = run(loop, other, *requests_of(prompt))
    check_like_transformers(outputs, expected_outputs, family)
    assert all(len(each.top) == 2 for each in outputs["scores"].prompt_logprobs)
    again = run(loop, *requests_of(prompt))[1]
    found, expected = ([each.chosen for each in those["scores"].prompt_logprobs] for those in (again, outputs))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
