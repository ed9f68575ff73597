"""MTP layers draft what transformers' decoder layers compute with their weights (tests/golden/mtp), and change no
answer."""

import functools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.core.cache_groups import STATE
from engine.core.loop import EngineLoop
from engine.core.types import Request, Sampling
from engine.errors import ConfigError
from engine.executors import make_executor, make_mtp_proposer
from engine.executors.speculation.executor import with_speculation
from engine.exporting.export import ExportOptions, export
from engine.exporting.manifest import Manifest
from engine.graph import load
from engine.models.config import MTP_GRAPH
from engine.models.config_fields import ModelError
from engine.models.families import FAMILIES
from engine.models.layers import LOGITS
from engine.models.mtp import MtpFamily
from engine.settings.config import Config
from tests.golden_arrays import golden, log_softmax
from tests.mtp_checkpoints import NAMES, make_mtp_checkpoint, make_right
from tests.pure.executors.test_draft_model import check_answers, run
from tests.quantized_checkpoints import change_tensors

ROOT = Path(__file__).parents[3]
BLOCK_SIZE = 16
BASE = Config(max_dec_len=64, batch_size=8, max_num_batched_tokens=48, block_bs=4, cpu_threads=1, device="cpu")
NUM_DRAFTS = 4
LAYOUTS = ("glm4_moe", "ernie4_5_moe", "qwen3_5_text")  # one family of each
DRAFTING = replace(BASE, speculate_method="mtp", speculate_max_draft_token_num=NUM_DRAFTS)


@pytest.fixture(scope="module")
def graph_dir(tmp_path_factory):
    """Return a function that exports the checkpoint of a family with its MTP layer."""

    @functools.cache
    def exported(family: str, is_right: bool = False, num_ranks: int = 1, int8_cache: bool = False) -> Path:
        out = tmp_path_factory.mktemp(family) / "out"
        checkpoint = make_mtp_checkpoint(out.parent / "checkpoint", family)
        if is_right:
            make_right(checkpoint, family)
        export(
            checkpoint, out, ExportOptions(block_size=BLOCK_SIZE, mtp=True, num_ranks=num_ranks, int8_cache=int8_cache)
        )
        return out

    return exported


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "family", [family if family in LAYOUTS else pytest.param(family, marks=pytest.mark.slow) for family in NAMES]
)
def test_drafts_behind_a_prompt_are_those_of_the_reference(family, num_ranks, graph_dir):
    exported = graph_dir(family, num_ranks=num_ranks)
    check_drafts(exported, replace(DRAFTING, mp_num=num_ranks), f"mtp/{family}")


def check_drafts(exported: Path, config: Config, arrays: str, draft_ids: np.ndarray | None = None) -> None:
    """Check the drafts and their log-probabilities. The prompts are computed in chunks of 24 tokens, and then once more
    with what the prefix cache has of them. `draft_ids` are the tokens of a head that has only some."""
    executor = make_executor(exported, replace(BASE, mp_num=config.mp_num))
    proposer = make_mtp_proposer(executor, Manifest.read(exported), config)
    drafting = with_speculation(executor, config, None, proposer)
    drafting.allocate(60)
    layer, found = proposer._model._graph, []
    compute = layer.run
    layer.run = lambda inputs: [outputs := compute(inputs), found.append(outputs[LOGITS].copy())][0]
    known = golden(arrays)
    loop = EngineLoop(drafting, 60, replace(config, max_num_batched_tokens=24))
    for length in (3, 70, 70):
        prompt = known[f"prompt_{length}"].tolist()
        request = Request("0", list(prompt), length, Sampling(8, temperature=0))
        loop.add(request)
        found.clear()
        while sum(map(len, found)) < NUM_DRAFTS:
            loop.step()
        assert request.token_ids[length] == known[f"first_{length}"]
        logprobs = log_softmax(np.concatenate(found)[:NUM_DRAFTS])
        np.testing.assert_allclose(logprobs, known[f"logprobs_{length}"], rtol=0, atol=1e-3)
        drafts = logprobs.argmax(axis=1)
        assert (drafts if draft_ids is None else draft_ids[drafts]).tolist() == known[f"tokens_{length}"].tolist()
        while not loop.is_idle:
            loop.step()
    has_states = any(group.kind == STATE for group in executor.cache_groups)  # which are found inside a block, too
    assert loop.stats()["num_cached_tokens"] == (69 if has_states else 64)
    drafting.close()


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(("glm4_moe", True, 1, 400), marks=pytest.mark.slow),
        ("glm4_moe", True, 1, 14),
        ("qwen3_5_text", False, 1, 400),
        pytest.param(("glm4_moe", True, 2, 14), marks=pytest.mark.slow),
        pytest.param(("qwen3_5_text", False, 2, 400), marks=pytest.mark.slow),
    ],
    ids=["right", "tiny pool", "wrong, with states", "ranks, tiny pool", "ranks, wrong, with states"],
)
def test_answers_with_an_mtp_layer_are_those_without(case, graph_dir):
    """The second round finds the prompts of the first in the prefix cache, with the layer's part of it."""
    check_layer_answers(graph_dir, case, DRAFTING)


@pytest.mark.slow
def test_answers_with_an_mtp_layer_and_an_int8_cache_of_latents_are_those_without(graph_dir):
    with_int8_cache = functools.partial(graph_dir, int8_cache=True)
    check_layer_answers(with_int8_cache, ("deepseek_v3", True, 1, 14), DRAFTING)


def check_layer_answers(graph_dir, case, drafting):
    """Check answers with and without the layer. `case`: family, whether drafts are right, ranks and number of
    blocks."""
    family, is_right, num_ranks, num_blocks = case
    exported = graph_dir(family, is_right, num_ranks)
    config, drafting = (replace(each, block_ratio=0.9, mp_num=num_ranks) for each in (BASE, drafting))
    executor = make_executor(exported, config)
    executor.allocate(400)
    expected, _ = run(executor, config, 400)
    proposer = make_mtp_proposer(executor, Manifest.read(exported), drafting)
    executor = with_speculation(executor, drafting, None, proposer)
    stats = check_answers(executor, (drafting, num_blocks), expected, is_right)
    assert stats[f"num_drafted_tokens/{drafting.speculate_method}/1"] > 0


@pytest.mark.slow
def test_the_executor_of_the_settings_drafts(graph_dir):
    answers = {}
    for config in (BASE, DRAFTING):
        executor = make_executor(graph_dir("glm4_moe", True), config)
        executor.allocate(60)
        answers[config], loop = run(executor, config, 60)
        executor.close()
    assert answers[BASE] == answers[DRAFTING]
    assert loop.stats()["num_drafted_tokens/mtp/1"] > 0


def test_the_next_turn_is_drafted_for_although_the_last_states_of_the_turn_before_were_never_read(graph_dir):
    executor = make_executor(graph_dir("glm4_moe", True), BASE)
    proposer = make_mtp_proposer(executor, Manifest.read(graph_dir("glm4_moe", True)), DRAFTING)
    drafting = with_speculation(executor, DRAFTING, None, proposer)
    drafting.allocate(60)
    loop, token_ids = EngineLoop(drafting, 60, DRAFTING), list(range(40))
    for _ in range(2):
        request = Request("0", list(token_ids), len(token_ids), Sampling(41, temperature=0))
        before = loop.stats()["num_accepted_tokens"]
        loop.add(request)
        while not loop.is_idle:
            loop.step()
        assert loop.stats()["num_accepted_tokens"] > before + 20
        token_ids = [*request.token_ids, 5]
    assert loop.stats()["num_cached_tokens"] == 80
    drafting.close()


def test_prompts_are_not_read_while_reading_costs_more_than_drafts_save(graph_dir):
    executor = make_executor(graph_dir("glm4_moe", True), BASE)
    proposer = make_mtp_proposer(executor, Manifest.read(graph_dir("glm4_moe", True)), DRAFTING)
    proposer._costs.may_read = lambda num_tokens, step_s: False
    drafting = with_speculation(executor, DRAFTING, None, proposer)
    drafting.allocate(60)
    loop = EngineLoop(drafting, 60, DRAFTING)
    for length, drafts_any in ((70, False), (5, True)):
        loop.add(Request("0", list(range(length)), length, Sampling(40, temperature=0)))
        while not loop.is_idle:
            loop.step()
        assert (loop.stats()["num_drafted_tokens"] > 0) == drafts_any
    drafting.close()


@pytest.mark.slow
def test_tables_are_shared_with_the_model_unless_the_layer_has_its_own(graph_dir, tmp_path):
    model = Manifest.read(graph_dir("glm4_moe"))
    executor = make_executor(graph_dir("glm4_moe"), BASE)
    program = make_mtp_proposer(executor, model, DRAFTING)._model._graph.program
    tables = {"embed_tokens.weight", "lm_head.weight"}
    for name in tables:
        assert program._held[name][1] is executor._program._held[name][1]
    executor.close()
    checkpoint = make_mtp_checkpoint(tmp_path / "checkpoint", "glm4_moe")
    own = "model.layers.3.shared_head.head.weight"
    change_tensors(checkpoint, lambda tensors: tensors.update({own: 2 * tensors[own]}))
    export(checkpoint, tmp_path / "out", ExportOptions(mtp=True))
    params = load(tmp_path / "out", name=MTP_GRAPH)[1]
    assert params.keys() & (tables | {own}) == {"embed_tokens.weight", own}
    np.testing.assert_array_equal(params[own], 2 * load(tmp_path / "out")[1]["lm_head.weight"])


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "glm4_moe",
            lambda tensors: tensors.pop("model.layers.3.eh_proj.weight"),
            "no layer that drafts .* is missing",
        ),
        ("glm4_moe", lambda tensors: tensors.pop("model.layers.3.hnorm.weight"), "hnorm.weight is missing"),
        ("ernie4_5_moe", lambda tensors: tensors.update({"model.mtp_linear_proj.0.bias": np.ones(64)}), "has no place"),
    ],
)
def test_a_checkpoint_whose_layer_is_not_complete_is_refused(family, change, message, tmp_path):
    checkpoint = make_mtp_checkpoint(tmp_path / "checkpoint", family)
    change_tensors(checkpoint, change)
    with pytest.raises(ModelError, match=message):
        export(checkpoint, tmp_path / "out", ExportOptions(mtp=True))


def test_a_family_without_such_a_layer_is_refused(checkpoint, exported, tmp_path):
    with pytest.raises(ModelError, match="config.json: model_type 'qwen2' has no layer that drafts"):
        export(checkpoint("qwen2"), tmp_path / "out", ExportOptions(mtp=True))
    with pytest.raises(ConfigError, match="was exported without the layer that drafts; export its checkpoint again"):
        make_executor(exported("qwen2"), DRAFTING)


def test_the_families_with_such_a_layer_are_documented():
    section = (ROOT / "docs/operation.md").read_text().split("### MTP layer")[1].split("\n##")[0]
    documented = {name for row in re.findall(r"^\| (`.*?`) \|", section, re.M) for name in re.findall(r"`(\w+)`", row)}
    known = {name for name, family in FAMILIES.items() if issubclass(family, MtpFamily) and family.mtp_layout}
    assert documented - {"model_type"} == {name.removesuffix("_text") for name in known}
