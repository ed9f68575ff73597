"""Models that take prompt spans: a span with the embeddings of ordinary tokens gives, bit for bit, the same answer."""

import zlib

import numpy as np
import pytest

from engine.core.spans import PromptSpan
from engine.core.types import Request, Sampling
from engine.executors import make_executor
from engine.executors.reference import ReferenceExecutor
from engine.executors.spans import positions_between
from engine.graph import load
from engine.models.config_fields import ModelError
from engine.models.families import read_model
from engine.ops import reference
from engine.settings.config import Config
from tests.checkpoints import COMMON, FAMILIES
from tests.golden_arrays import golden
from tests.span_models import (
    IMAGES,
    MROPE,
    PROMPT_WITH_IMAGES,
    a_loop,
    an_image,
    answers_of,
    export_with_spans,
    random_requests,
    table_of,
    with_spans,
)

pytestmark = pytest.mark.slow

SETTINGS = {"batch_size": 8, "block_ratio": 0.99}


@pytest.fixture(scope="module")
def models(exported, checkpoint, tmp_path_factory):
    """Return graphs of the same weights, by kind and number of ranks."""
    folder = tmp_path_factory.mktemp("spans")
    made = {("text", n): exported("qwen2", block_size=16, num_ranks=n) for n in (1, 2)}
    for kind, rope in (("spans", None), ("mrope", MROPE)):
        for n in (1, 2):
            made[kind, n] = export_with_spans(checkpoint("qwen2"), folder / f"{kind}-{n}", rope, num_ranks=n)
    return made


@pytest.fixture(scope="module")
def requests(models):
    """Return requests of ordinary tokens, and the same ones with spans."""
    ordinary, table = random_requests(seed=1), table_of(models["text", 1])
    return ordinary, [with_spans(each, table, seed) for seed, each in enumerate(ordinary)]


@pytest.fixture(scope="module")
def expected(models, requests):
    """Return the answers to ordinary tokens by a model that takes text only, by number of ranks."""
    found = {}
    for num_ranks in (1, 2):
        config = Config(mp_num=num_ranks, cpu_threads=1, **SETTINGS)
        executor = make_executor(models["text", num_ranks], config)
        found[num_ranks] = answers_of(a_loop(executor, config), requests[0])
        executor.close()
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "num_ranks"), [("spans", 1), ("mrope", 1), ("spans", 2), ("mrope", 2)])
def test_spans_answer_as_ordinary_tokens(models, requests, expected, kind, num_ranks):
    """The prompts run in one chunk, in chunks of 24 tokens across the borders of spans, again from the prefix cache,
    and with so few blocks that requests are preempted.
    """
    config = Config(mp_num=num_ranks, cpu_threads=1, **SETTINGS)
    executor = make_executor(models[kind, num_ranks], config)
    for sizes, num_blocks in (({}, 200), ({"max_num_batched_tokens": 24}, 200), ({"max_num_batched_tokens": 24}, 16)):
        loop = a_loop(executor, Config(mp_num=num_ranks, cpu_threads=1, **SETTINGS, **sizes), num_blocks)
        assert answers_of(loop, requests[1]) == expected[num_ranks]
        if num_blocks == 16:
            assert loop.stats()["num_preemptions"] > 0
            continue
        assert answers_of(loop, requests[0]) == expected[num_ranks]  # text alone
        num_cached = loop.stats()["num_cached_tokens"]
        assert answers_of(loop, requests[1]) == expected[num_ranks]
        assert loop.stats()["num_cached_tokens"] > num_cached + 300
    executor.close()


def test_other_embeddings_give_another_answer(models, requests, expected):
    executor = make_executor(models["spans", 1], Config(**SETTINGS))
    changed = [
        Request(each.request_id, each.token_ids, each.prompt_len, each.sampling, spans=changed_spans(each.spans))
        for each in requests[1]
    ]
    found = answers_of(a_loop(executor, Config(**SETTINGS)), changed)
    assert all(found[index] != expected[1][index] for index in found)
    executor.close()


def changed_spans(spans):
    return [
        PromptSpan(span.start, span.length, span.content_hash + b"!", (-np.frombuffer(span.embeddings, "f4")).tobytes())
        for span in spans
    ]


def test_a_text_model_has_no_inputs_for_spans(models):
    graphs = {kind: load(models[kind, 1])[0] for kind in ("text", "spans", "mrope")}
    assert not {"embedding_rows", "span_embeddings"} & graphs["text"].inputs.keys()
    assert {"embedding_rows", "span_embeddings"} <= graphs["spans"].inputs.keys()
    assert graphs["text"].inputs["positions"].shape == graphs["spans"].inputs["positions"].shape == (-1,)
    assert graphs["mrope"].inputs["positions"].shape == (3, -1)
    ops = {kind: [node.op for node in graph.nodes] for kind, graph in graphs.items()}
    assert ops["spans"] == [*ops["text"][:1], "replace_rows", *ops["text"][1:]]
    assert ops["mrope"] == ["mrope_angles" if op == "rotary_angles" else op for op in ops["spans"]]


# Positions of M-RoPE


def test_positions_are_those_of_the_paper():
    """Text, an image of 2 by 3 patches, text, a film of 2 frames of 1 by 2 patches, text."""
    spans = [an_image(2, 2, 3), an_image(9, 1, 2, frames=2)]
    expected = [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 7, 7, 8, 9],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 6, 6, 6, 8, 9],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 6, 7, 8, 9],
    ]
    for start in range(15):
        for end in range(start, 16):
            found = positions_between(spans, start, end)
            assert found[:, : 15 - start].tolist() == [row[start:end] for row in expected]
    assert sum(span.position_delta for span in spans) == 9 - 14


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"type": "mrope", "mrope_section": [3, 2, 3]}, "ttthhwww"),
        ({"rope_type": "default", "mrope_section": [3, 2, 3]}, "ttthhwww"),
        ({"rope_type": "default", "mrope_section": [3, 3, 2], "mrope_interleaved": True}, "thwthwth"),
        ({"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}, "thwthwtt"),
    ],
)
def test_sections_say_which_position_makes_an_angle(rope, expected):
    config = read_model({**COMMON, **FAMILIES["qwen2"], "rope_scaling": rope})
    assert "".join("thw"[axis] for axis in config.rope.axes) == expected


@pytest.mark.parametrize(
    ("sections", "message"),
    [([3, 2], "a list of three whole numbers"), ([3, 2, 4], "its sum must be 8"), ([9, 0, -1], "its sum must be 8")],
)
def test_sections_that_do_not_fit_are_refused(sections, message):
    with pytest.raises(ModelError, match=message):
        read_model({**COMMON, **FAMILIES["qwen2"], "rope_scaling": {"type": "mrope", "mrope_section": sections}})


@pytest.mark.parametrize("sections", [[16, 24, 24], [8, 12, 12]])
def test_angles_are_those_of_the_models_formula(sections):
    """Qwen2.5-VL computes the cosines of all three positions, and each section takes its own."""
    half = sum(sections)
    positions = np.random.default_rng(0).integers(0, 3000, (3, 20)).astype(np.int32)
    keys = {**COMMON, **FAMILIES["qwen2"], "head_dim": 2 * half, "rope_theta": 1e6}
    rope = read_model({**keys, "rope_scaling": {"type": "mrope", "mrope_section": sections}}).rope
    angles = positions[:, :, None].astype(np.float32) * rope.inv_freq
    cosines, sines = (np.concatenate([of(angles.astype(np.float64))] * 2, axis=-1) for of in (np.cos, np.sin))
    ends = np.cumsum(sections * 2)[:-1]
    expected = [
        np.concatenate([part[i % 3] for i, part in enumerate(np.split(each, ends, axis=-1))], axis=-1)
        for each in (cosines, sines)
    ]
    found = reference.mrope_angles(positions, rope.inv_freq, rope.axes, attention_scaling=1.0)
    np.testing.assert_allclose(found, np.concatenate([each[:, :half] for each in expected], axis=1), atol=1e-7)
    assert all(np.array_equal(each[:, :half], each[:, half:]) for each in expected)


def test_images_have_positions_in_rows_and_columns(models):
    """Every executor and every chunking gives the same answer, which depends on the grid and on no earlier token."""
    token_ids = PROMPT_WITH_IMAGES
    answers = {}
    for grids in ((3, 4, 5, 6), (4, 3, 5, 6), (3, 4, 6, 5)):
        spans = [an_image(2, *grids[:2]), an_image(15, *grids[2:], seed=1)]
        request = Request("0", token_ids, len(token_ids), Sampling(20, temperature=0, num_logprobs=0), spans=spans)
        for make, settings in ((make_executor, {}), (make_executor, {"max_num_batched_tokens": 11}), (None, {})):
            config = Config(**SETTINGS, **settings)
            executor = make(models["mrope", 1], config) if make else ReferenceExecutor(models["mrope", 1])
            [answer] = answers_of(a_loop(executor, config), [request]).values()
            answers.setdefault(grids, []).append([(token_id, logprobs.chosen) for token_id, logprobs in answer])
            executor.close()
    for whole, in_chunks, defined in answers.values():
        assert whole == in_chunks
        assert [token_id for token_id, _ in whole] == [token_id for token_id, _ in defined]
        np.testing.assert_allclose([each for _, each in whole], [each for _, each in defined], atol=1e-4)
    first_logprobs = {answer[0][0][1] for answer in answers.values()}
    assert len(first_logprobs) == 3


# Transformers


@pytest.fixture(scope="module")
def mrope():
    return golden("mrope")


def test_positions_are_those_of_transformers(mrope):
    positions = positions_between(IMAGES, 0, mrope["positions"].shape[1])
    np.testing.assert_array_equal(positions, mrope["positions"])


def test_interleaved_sections_are_those_of_transformers(mrope):
    for sections in ([24, 20, 20], [11, 11, 10]):
        rope = {"type": "mrope", "mrope_section": sections, "mrope_interleaved": True}
        config = read_model({**COMMON, **FAMILIES["qwen2"], "head_dim": 2 * sum(sections), "rope_scaling": rope})
        np.testing.assert_array_equal(config.rope.axes, mrope["axes_" + "_".join(map(str, sections))])


def test_answers_behind_images_are_those_of_transformers(models, checkpoint, mrope):
    assert zlib.crc32((checkpoint("qwen2") / "model.safetensors").read_bytes()) == mrope["checksum"]
    sampling = Sampling(len(mrope["tokens"]), temperature=0, num_logprobs=0)
    request = Request("0", PROMPT_WITH_IMAGES, len(PROMPT_WITH_IMAGES), sampling, spans=IMAGES)
    executor = make_executor(models["mrope", 1], Config(**SETTINGS))
    [answer] = answers_of(a_loop(executor, Config(**SETTINGS, max_num_batched_tokens=24)), [request]).values()
    executor.close()
    assert [token_id for token_id, _ in answer] == mrope["tokens"].tolist()
    np.testing.assert_allclose([logprobs.chosen for _, logprobs in answer], mrope["logprobs"], rtol=0, atol=2e-4)
