"""Models that read images, against what transformers computes for them (tests/golden/images): all 64 tokens of an
answer, log-probabilities within 2e-4, embeddings within the rounding of f16."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.core.loop import EngineLoop
from engine.core.types import Request, Sampling
from engine.errors import InvalidRequest
from engine.executors import make_executor, make_mtp_proposer
from engine.executors.cpu.vision_encoder import CpuVisionEncoder
from engine.executors.speculation.executor import with_speculation
from engine.exporting.export import ExportOptions, export
from engine.exporting.manifest import Manifest
from engine.graph import load
from engine.graph.run import run_graph
from engine.link.journal import JournalEntry, Submission
from engine.models.adapters import AdapterError, checked, identified
from engine.models.config_fields import read_json
from engine.models.families import read_model
from engine.models.vision_inputs import tower_inputs
from engine.settings.config import Config
from tests.checkpoints import write_tensors
from tests.eagle3_checkpoints import make_head
from tests.golden_arrays import golden
from tests.images import MODEL_TYPES, PROCESSORS, PROMPTS, a_processor, prompt_of
from tests.lora_adapters import make_adapter, merged
from tests.mtp_checkpoints import mtp_tensors
from tests.patience import wait_until
from tests.pure.engine_helpers import ROOT, Collector, a_client

pytestmark = pytest.mark.slow

SETTINGS = {"batch_size": 4, "block_ratio": 0.99, "cpu_threads": 1}
BLOCK_SIZE = 16
END = 300  # ends a message


def a_request(family: str, number: int, name: str = "", **sampling) -> Request:
    token_ids, spans = prompt_of(family, PROMPTS[number])
    given = {"temperature": 0.0, "num_logprobs": 0, **sampling}
    return Request(f"{number}{name}", token_ids, len(token_ids), Sampling(64, **given), spans=spans)


def answers_of(loop: EngineLoop, requests: list[Request]) -> dict[str, tuple[list[int], list[float]]]:
    """Return the tokens and their log-probabilities by the ids of the requests."""
    answers: dict[str, tuple[list[int], list[float]]] = {}
    for request in requests:
        loop.add(request)
        answers[request.request_id] = [], []
    while not loop.is_idle:
        for update in loop.step():
            tokens, logprobs = answers[update.request.request_id]
            tokens += update.token_ids
            logprobs += [each.chosen for each in update.logprobs or ()]
    loop.scheduler.check()
    return answers


class CountingEncoder:
    """Counts the images that an encoder encodes."""

    def __init__(self, encoder: CpuVisionEncoder):
        self.begun: list[bytes] = []
        self.advance, self.check, self._begin = encoder.advance, encoder.check, encoder.begin

    def begin(self, span) -> None:
        self.begun.append(span.content_hash)
        self._begin(span)


def a_loop(executor, num_blocks=200, **settings) -> EngineLoop:
    executor.allocate(num_blocks)
    return EngineLoop(executor, num_blocks, Config(**SETTINGS, **settings))


@pytest.mark.parametrize("family", MODEL_TYPES)
def test_the_definition_computes_the_embeddings_of_transformers(family, exported):
    graph_dir, expected, processor = exported(family), golden(f"images/{family}"), a_processor(family)
    config = read_model(read_json(graph_dir / "config.json")).vision
    graph, params = load(graph_dir, name="vision")
    for number in range(len(PROMPTS)):
        found = []
        for span in prompt_of(family, PROMPTS[number])[1]:
            pixels = np.frombuffer(span.pixels, np.uint8).reshape(*(processor.unit * each for each in span.grid[1:]), 3)
            inputs = tower_inputs(config, processor.patches(pixels), span.grid)
            found.append(np.concatenate(list(run_graph(graph, params, inputs).values()), axis=1))
        np.testing.assert_allclose(np.concatenate(found), expected[f"embeddings_{number}"], rtol=2e-3, atol=5e-3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("family", MODEL_TYPES)
def test_answers_are_those_of_transformers(family, num_ranks, exported):
    """All prompts at once, in chunks that end inside images, and so few blocks that requests are preempted; then again,
    from the prefix cache."""
    expected = golden(f"images/{family}")
    config = Config(mp_num=num_ranks, **SETTINGS)
    executor = make_executor(exported(family, block_size=BLOCK_SIZE, num_ranks=num_ranks), config)
    executor.vision = encoder = CountingEncoder(executor.vision)
    few = 40 if family == "qwen3_5" else 17  # a state takes several blocks
    for num_blocks, sizes in ((200, {}), (200, {"max_num_batched_tokens": 5}), (few, {"max_num_batched_tokens": 11})):
        loop = a_loop(executor, num_blocks, **sizes)
        encoder.begun.clear()
        for turn in range(1 + (num_blocks == 200)):
            found = answers_of(loop, [a_request(family, number) for number in range(len(PROMPTS))])
            for number in range(len(PROMPTS)):
                tokens, logprobs = found[str(number)]
                assert tokens == expected[f"tokens_{number}"].tolist(), (num_blocks, turn, number)
                wanted = expected[f"logprobs_{number}"][-1, tokens[0]]
                assert logprobs[0] == pytest.approx(wanted, abs=2e-4)
        assert len(encoder.begun) == len(set(encoder.begun)) == 6  # each image once
        assert (loop.stats()["num_preemptions"] > 0) == (num_blocks == few)
    executor.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", PROCESSORS)
def test_an_image_that_the_prefix_cache_has_is_not_encoded(family, exported):
    executor = make_executor(exported(family, block_size=4), Config(**SETTINGS))
    executor.vision = encoder = CountingEncoder(executor.vision)
    loop = a_loop(executor, 200)
    [first] = answers_of(loop, [a_request(family, 2)]).values()
    loop._images._embeddings.clear()  # as if other images had come between
    encoder.begun.clear()
    request = a_request(family, 2)
    [again] = answers_of(loop, [request]).values()
    assert again == first and request.num_cached > request.spans[0].end
    # The last token is computed again, and the second image ends before the last full block.
    assert len(encoder.begun) == (request.num_cached < request.spans[1].end)
    executor.close()


@pytest.mark.parametrize("behind", [[], [[50] * 40, [END], [60] * 3]], ids=["alone", "behind a system prompt"])
def test_a_second_question_about_an_image_finds_as_much_in_a_model_with_states(behind, exported):
    """It computes as many tokens as a model without states; the answers are those without the prefix cache."""
    found, answers = {}, {}
    for family, caching in (("qwen3_vl", True), ("qwen3_5", True), ("qwen3_5", False)):
        executor = make_executor(exported(family, block_size=BLOCK_SIZE), Config(**SETTINGS))
        executor.vision = encoder = CountingEncoder(executor.vision)
        loop, found[family] = a_loop(executor, 400, enable_prefix_caching=caching), []
        for number, question in enumerate(([70] * 30, [80] * 30)):
            token_ids, spans = prompt_of(family, [*behind, (120, 200, 4), question, [END], [60] * 3])
            sampling = Sampling(16, temperature=0, num_logprobs=0, stop_token_ids=(END,))
            request = Request(str(number), token_ids, len(token_ids), sampling, spans=spans)
            answers.setdefault((family, caching), []).append(answers_of(loop, [request]))
            found[family].append(request.num_cached)
        assert len(encoder.begun) == 1
        if caching:
            assert found[family] == [0, (spans[0].end + 1) // BLOCK_SIZE * BLOCK_SIZE]
            assert loop.stats()["num_tokens_without_state"] == 0
        executor.close()
    assert answers["qwen3_5", True] == answers["qwen3_5", False]


def test_quantized_text_keeps_the_tower_as_it_is(exported):
    plain, quantized = exported("paddleocr_vl"), exported("paddleocr_vl", quant_type="weight_only_int8")
    params = [load(folder, name="vision")[1] for folder in (plain, quantized)]
    assert params[0].keys() == params[1].keys()
    assert all(np.array_equal(params[0][name], params[1][name]) for name in params[0])
    answers = []
    for folder in (plain, quantized):
        executor = make_executor(folder, Config(**SETTINGS))
        answers.append(answers_of(a_loop(executor), [a_request("paddleocr_vl", 2)])["2"])
        executor.close()
    assert answers[0][1][0] == pytest.approx(answers[1][1][0], abs=0.2) and answers[0] != answers[1]


@pytest.mark.parametrize("family", MODEL_TYPES[:2])
def test_an_adapter_of_the_decoder_changes_answers_as_merged_weights_do(family, checkpoint, exported, tmp_path):
    adapter = make_adapter(tmp_path / "adapter", checkpoint(family), seed=1)
    with pytest.raises(AdapterError, match="tensor base_model.model..*visual.* for which the model has no place"):
        checked(adapter, exported(family), max_rank=8)
    tensors = load_file(adapter / "adapter_model.safetensors")
    of_text = {name: tensor for name, tensor in tensors.items() if "visual" not in name}
    save_file(of_text, adapter / "adapter_model.safetensors")
    export(merged(tmp_path / "merged", checkpoint(family), adapter), tmp_path / "out", ExportOptions())
    answers = []
    for folder, given in ((exported(family), identified(adapter)), (tmp_path / "out", ())):
        config = Config(**SETTINGS, max_loras=1)
        executor = make_executor(folder, config)
        loop = a_loop(executor, max_loras=1)
        answers.append(answers_of(loop, [a_request(family, 2, adapter=given)])["2"])
        executor.close()
    assert answers[0][0] == answers[1][0] != golden(f"images/{family}")["tokens_2"].tolist()


def test_every_rank_has_the_tower_and_a_text_model_has_none(exported):
    graphs = Manifest.read(exported("qwen2_5_vl")).graphs
    assert list(graphs) == ["decoder", "vision"]
    assert graphs["vision"].inputs == (*("patches", "positions", "segment_ends", "window_ends", "token_rows"),)
    assert "grid_rows" in Manifest.read(exported("paddleocr_vl")).graphs["vision"].inputs
    assert list(Manifest.read(exported("qwen2")).graphs) == ["decoder"]


def test_pixels_and_embeddings_of_an_image_give_the_same_answer(exported):
    executor = make_executor(exported("paddleocr_vl"), Config(**SETTINGS))
    wanted = answers_of(a_loop(executor), [a_request("paddleocr_vl", 0)])
    request = a_request("paddleocr_vl", 0)
    [span] = request.spans
    executor.vision.begin(span)
    embeddings = executor.vision.advance().result().embeddings
    request.spans = [replace(span, pixels=b"", embeddings=embeddings)]
    assert answers_of(a_loop(executor), [request]) == wanted
    executor.close()


def test_pixels_that_are_no_image_of_the_grid_are_refused(exported):
    executor = make_executor(exported("paddleocr_vl"), Config(**SETTINGS))
    loop = a_loop(executor)
    for changes in ({"pixels": b"1234"}, {"grid": ()}):
        request = a_request("paddleocr_vl", 0)
        request.spans = [replace(span, **changes) for span in request.spans]
        with pytest.raises(InvalidRequest, match="an image of 1 tokens has 2352 bytes of pixels"):
            loop.add(request)
    assert loop.is_idle
    executor.close()


def test_drafts_and_several_answers_to_an_image_change_no_token(exported):
    expected = golden("images/qwen2_5_vl")["tokens_3"].tolist()
    config = Config(**SETTINGS, speculate_method="ngram", speculate_max_ngram_size=1)
    executor = with_speculation(make_executor(exported("qwen2_5_vl"), Config(**SETTINGS)), config)
    request = a_request("qwen2_5_vl", 3)
    request.forks = [
        Request(f"3 {n}", list(request.token_ids), request.prompt_len, request.sampling, spans=request.spans)
        for n in range(2)
    ]
    executor.allocate(200)
    loop = EngineLoop(executor, 200, config)
    answers: dict[str, list[int]] = {}
    loop.add(request)
    while not loop.is_idle:
        for update in loop.step():
            answers.setdefault(update.request.request_id, []).extend(update.token_ids)
    assert list(answers.values()) == [expected] * 3
    assert loop.stats()["num_drafted_tokens"] > 0
    executor.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_drafts_of_a_layer_that_sees_no_images_change_no_token(method, checkpoint, tmp_path):
    model, out, options = tmp_path / "model", tmp_path / "out", {"mtp": True}
    shutil.copytree(checkpoint("qwen3_5"), model)
    if method == "mtp":
        tensors = load_file(model / "model.safetensors")
        of_text = {name.replace("language_model.", ""): tensor for name, tensor in tensors.items()}
        write_tensors(model / "model.safetensors", tensors | mtp_tensors("qwen3_5_text", of_text))
    else:
        options = {"eagle3": str(make_head(tmp_path / "head", "llama", model))}
    export(model, out, ExportOptions(**options))
    executor = make_executor(out, Config(**SETTINGS))
    config = Config(**SETTINGS, speculate_method=method, speculate_max_draft_token_num=2)
    executor = with_speculation(executor, config, None, make_mtp_proposer(executor, Manifest.read(out), config))
    loop = a_loop(executor)
    found = answers_of(loop, [a_request("qwen3_5", number) for number in range(len(PROMPTS))])
    expected = golden("images/qwen3_5")
    for number in range(len(PROMPTS)):
        assert found[str(number)][0] == expected[f"tokens_{number}"].tolist()
    assert loop.stats()["num_drafted_tokens"] > 0
    executor.close()


def test_an_answer_to_an_image_goes_on_after_the_engine_was_killed(exported, tmp_path):
    """The client sends the pixels again, and the new process encodes them."""
    request, listener = a_request("paddleocr_vl", 2), Collector()
    sampling = replace(request.sampling, max_new_tokens=900)
    command = [sys.executable, "-m", "engine.process"]
    environ = {**os.environ, "RUN_DIR": str(tmp_path), "MODEL_DIR": str(exported("paddleocr_vl")), "CPU_THREADS": "1"}
    engines = [subprocess.Popen(command, cwd=ROOT, env=environ)]
    try:
        with a_client(f"ipc://{tmp_path}/engine.sock") as client:
            submissions = [Submission("killed", sampling, listener)]
            client.submit(JournalEntry.of(request.token_ids, submissions, spans=request.spans))
            wait_until(lambda: len(listener.token_ids) > 4)
            engines[0].kill()
            engines.append(subprocess.Popen(command, cwd=ROOT, env=environ))
            assert listener.wait() == "length"
            assert client.num_restarts == 1
    finally:
        for engine in engines:
            engine.kill()
            engine.wait()
    assert listener.token_ids[:64] == golden("images/paddleocr_vl")["tokens_2"].tolist()
    assert len(listener.token_ids) == 900
