"""Answers are bitwise identical with a draft model, right or wrong; one that does not fit is refused."""

import json
from dataclasses import replace

import pytest

from engine.core.loop import EngineLoop
from engine.core.types import Request, Sampling
from engine.errors import ConfigError
from engine.executors import make_draft_model_proposer, make_executor
from engine.executors.speculation.executor import with_speculation
from engine.exporting.draft import export_draft_model
from engine.exporting.export import ExportOptions, export
from engine.exporting.manifest import Manifest
from engine.settings.config import Config
from tests.checkpoints import make_checkpoint
from tests.pure.core.test_beams import a_search

BLOCK_SIZE = 16
BASE = Config(max_dec_len=64, batch_size=8, max_num_batched_tokens=48, block_bs=4, cpu_threads=1, device="cpu")
STEM = [7 * n % 300 for n in range(40)]


def samplings():
    return [
        Sampling(40, temperature=0, num_logprobs=2),
        Sampling(33, temperature=1.0, seed=3, num_logprobs=0),
        Sampling(40, temperature=0.8, top_p=0.9, seed=2**63, num_logprobs=0),
        Sampling(24, temperature=0, min_new_tokens=24, stop_token_ids=tuple(range(100))),
        Sampling(40, temperature=0, repetition_penalty=1.3, frequency_penalty=0.5, num_logprobs=0),
        Sampling(40, temperature=1.0, seed=5, logit_bias=((17, 4.0),), bad_words=((5, 6), (7,)), num_logprobs=0),
        Sampling(1, temperature=0),
        Sampling(12, temperature=0, num_prompt_logprobs=1, num_logprobs=0),
    ]


def run(executor, config, num_blocks, times=1):
    """Return the answers of the last of `times` rounds, with the bits of their log-probabilities, and the loop. Two of
    the requests have forks, and one is a beam search."""
    loop = EngineLoop(executor, num_blocks, config)
    for _ in range(times):
        answers = {}
        for index, sampling in enumerate(samplings()):
            prompt = STEM[: (0, 16, 17, 40)[index % 4]] + [(31 * index + n) % 300 for n in range(3 + 9 * index)]
            request = Request(str(index), list(prompt), len(prompt), sampling)
            if index in (1, 2):
                request.forks = [
                    Request(f"{index}-{n}", list(prompt), len(prompt), replace(sampling, seed=n)) for n in (1, 2)
                ]
            loop.add(request)
        loop.add(a_search("search", STEM, 3))
        while not loop.is_idle:
            for update in loop.step():
                answer = answers.setdefault(update.request.request_id, [])
                answer += zip(update.token_ids, update.logprobs or [None] * len(update.token_ids), strict=True)
    return answers, loop


def check_answers(executor, setting, expected, is_right):
    """Check that answers with drafts are the expected ones, and that drafts are right or wrong. `setting` is the config
    and the number of blocks. The executor has no policy, so that all is drafted. Return the statistics."""
    config, num_blocks = setting
    executor.allocate(num_blocks)
    answers, loop = run(executor, config, num_blocks, times=2)
    executor.close()
    assert answers == expected
    stats = loop.stats()
    share = stats["num_accepted_tokens"] / stats["num_drafted_tokens"]
    assert share > 0.6 if is_right else share < 0.4
    assert (stats["num_preemptions"] > 0) == (num_blocks < 400)
    assert stats["num_cached_tokens"] > 0
    return stats


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return a model, and one with other weights and fewer layers."""
    folder = tmp_path_factory.mktemp("checkpoints")
    own = make_checkpoint(folder / "own", "qwen2", seed=1)
    return {"itself": own, "another": make_checkpoint(folder / "other", "llama3", seed=9, num_hidden_layers=1)}


@pytest.fixture(scope="module")
def graph_dirs(checkpoints, tmp_path_factory):
    made = {}
    for num_ranks in (1, 2):
        made[num_ranks] = tmp_path_factory.mktemp("exported") / str(num_ranks)
        export(checkpoints["itself"], made[num_ranks], ExportOptions(block_size=BLOCK_SIZE, num_ranks=num_ranks))
    return made


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(("itself", 1, 400), marks=pytest.mark.slow),
        ("another", 1, 400),
        ("itself", 1, 14),
        pytest.param(("itself", 2, 400), marks=pytest.mark.slow),
    ],
    ids=["right", "wrong", "tiny pool", "ranks"],
)
def test_answers_with_a_draft_model_are_those_without(checkpoints, graph_dirs, tmp_path, case):
    """The second round finds the prompts of the first in the prefix cache, with the draft model's part of it."""
    draft, num_ranks, num_blocks = case
    config = replace(BASE, mp_num=num_ranks, block_ratio=0.9)
    model = make_executor(graph_dirs[num_ranks], config)
    model.allocate(400)
    expected, _ = run(model, config, 400)
    settings = {"speculate_model_path": str(checkpoints[draft]), "export_cache_dir": str(tmp_path)}
    config = replace(config, speculate_method="draft", **settings)
    draft_dir = export_draft_model(graph_dirs[num_ranks], config, lambda text: None)
    proposer = make_draft_model_proposer(draft_dir, Manifest.read(graph_dirs[num_ranks]), config)
    check_answers(with_speculation(model, config, None, proposer), (config, num_blocks), expected, draft == "itself")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}, "layer_types: a layer of the"),
        ({"tokenizer": "another"}, "tokenizer.json: the draft model has .* tokens, the served model has"),
    ],
    ids=["window", "vocabulary"],
)
def test_a_draft_model_that_does_not_fit_is_refused(graph_dirs, tmp_path, changes, message):
    is_other = changes.pop("tokenizer", None)
    draft = make_checkpoint(tmp_path / "draft", "qwen2", **changes)
    if is_other:
        document = json.loads((draft / "tokenizer.json").read_text())
        document["model"]["vocab"].pop("z")
        (draft / "tokenizer.json").write_text(json.dumps(document))
    config = replace(BASE, speculate_method="draft", speculate_model_path=str(draft), export_cache_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=f"SPECULATE_MODEL_PATH is '{draft}': {message}"):
        make_executor(graph_dirs[1], config)


def test_a_draft_model_must_be_named():
    with pytest.raises(ConfigError, match="SPECULATE_METHOD is draft, it needs SPECULATE_MODEL_PATH"):
        Config.from_env({"SPECULATE_METHOD": "draft"})
    with pytest.raises(ConfigError, match="SPECULATE_MODEL_PATH is '/nowhere', which has no config.json"):
        Config.from_env({"SPECULATE_METHOD": "draft", "SPECULATE_MODEL_PATH": "/nowhere"})
