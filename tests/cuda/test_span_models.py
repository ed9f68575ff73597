"""Models that take prompt spans, on the GPU: a span with the embeddings of ordinary tokens gives, bit for bit, the same
answer."""

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install .[cuda]")

from engine.core.types import Request, Sampling  # noqa: E402
from engine.executors import make_host  # noqa: E402
from engine.executors.cuda.executor import CudaExecutor  # noqa: E402
from engine.executors.reference import ReferenceExecutor  # noqa: E402
from engine.settings.config import Config  # noqa: E402
from tests.cuda.conftest import IS_INTERPRETED, ROOT  # noqa: E402
from tests.span_models import (  # noqa: E402
    IMAGES,
    MROPE,
    PROMPT_WITH_IMAGES,
    a_loop,
    answers_of,
    export_with_spans,
    random_requests,
    table_of,
    with_spans,
)

SETTINGS = Config(device="gpu", batch_size=8, block_ratio=0.99, batch_invariant=True, cudagraph_capture_sizes="1,2,4,8")
ROPES = {"spans": None, "mrope": MROPE}
MAX_ERROR = 2e-4  # of log-probabilities in float32


@pytest.fixture(scope="module")
def model(exported):
    """Return the graph of the same weights that takes text only, or spans. Kept in build/golden as others."""

    def make(kind, **options):
        if kind == "text":
            return exported("qwen2", block_size=16, **options)
        exported("qwen2")  # its checkpoint
        directory = ROOT / "build/golden" / "-".join(["qwen2", kind, *map(str, options.values())])
        if not directory.exists():
            export_with_spans(ROOT / "build/golden/qwen2", directory, ROPES[kind], dtype="float32", **options)
        return directory

    return make


@pytest.fixture(scope="module")
def requests(model):
    """Return requests of ordinary tokens, and the same ones with spans."""
    ordinary, table = random_requests(seed=1, count=2 if IS_INTERPRETED else 12), table_of(model("text"))
    if IS_INTERPRETED:
        for each in ordinary:
            each.sampling = dataclasses.replace(each.sampling, max_new_tokens=2)
    return ordinary, [with_spans(each, table, seed) for seed, each in enumerate(ordinary)]


@pytest.mark.parametrize("kind", ["mrope"] if IS_INTERPRETED else ROPES)
def test_spans_answer_as_ordinary_tokens(model, requests, device, kind):
    """The prompts run in one chunk, in chunks of 24 tokens across the borders of spans, again from the prefix cache,
    with preemption, and with blocks that come back from the host's memory.
    """
    executor = CudaExecutor(model("text"), SETTINGS, device.type)
    expected = answers_of(a_loop(executor, SETTINGS), requests[0])
    executor.close()
    small = 8 if IS_INTERPRETED else 16
    ways = (({}, 200), ({"max_num_batched_tokens": 24}, 200), ({"swap_space": 0.05}, small))
    for sizes, num_blocks in ways[IS_INTERPRETED:]:
        config = dataclasses.replace(SETTINGS, **sizes)
        executor = CudaExecutor(model(kind), config, device.type)
        loop = a_loop(executor, config, num_blocks)
        assert answers_of(loop, requests[1]) == expected
        before = loop.stats()["num_cached_tokens"]
        assert answers_of(loop, requests[1]) == expected
        num_cached = loop.stats()["num_cached_tokens"] - before
        assert num_cached > 32
        assert answers_of(loop, requests[0]) == expected  # text alone
        if num_blocks == small and not IS_INTERPRETED:
            assert loop.stats()["num_preemptions"] > 0
            assert num_cached > num_blocks * executor.block_size  # more than the GPU's memory holds
        executor.close()


def test_spans_of_ranks_answer_as_ordinary_tokens(model, requests, two_devices, monkeypatch):
    monkeypatch.setattr("engine.executors.memory.with_device", lambda config: config)
    config = dataclasses.replace(SETTINGS, mp_num=2, batch_invariant=False, max_num_batched_tokens=24)
    config = dataclasses.replace(config, use_cudagraph=False)  # the same kernels with embeddings and without
    answers = []
    for each, prompts in (("text", requests[0]), ("mrope", requests[1])):
        executor = make_host(model(each, num_ranks=2), config)
        answers.append(answers_of(a_loop(executor, config), prompts))
        executor.close()
    assert answers[0] == answers[1]


def test_images_have_positions_in_rows_and_columns(model, device):
    """Chunks end in an image, and decoding behind it uses captured graphs."""
    sampling = Sampling(4 if IS_INTERPRETED else 20, temperature=0, num_logprobs=0)
    request = Request("0", PROMPT_WITH_IMAGES, len(PROMPT_WITH_IMAGES), sampling, spans=IMAGES)
    answers = []
    for chunk in (0, 96, 11):
        config = dataclasses.replace(SETTINGS, max_num_batched_tokens=chunk or 96)
        executor = CudaExecutor(model("mrope"), config, device.type) if chunk else ReferenceExecutor(model("mrope"))
        [answer] = answers_of(a_loop(executor, config), [request]).values()
        answers.append([(token_id, logprobs.chosen) for token_id, logprobs in answer])
        executor.close()
    defined, whole, in_chunks = answers
    assert whole == in_chunks
    assert [token_id for token_id, _ in whole] == [token_id for token_id, _ in defined]
    np.testing.assert_allclose([each for _, each in whole], [each for _, each in defined], atol=MAX_ERROR)
