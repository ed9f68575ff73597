"""Drafts of a draft model, an MTP layer and an EAGLE-3 head on the GPU: they are those of the reference, and change no
answer."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install .[cuda]")

from engine.core.cache_groups import STATE  # noqa: E402
from engine.core.draft_counts import ACCEPTED, DRAFTED  # noqa: E402
from engine.core.loop import EngineLoop  # noqa: E402
from engine.core.types import Arrival, Batch, Request, Row, Sampling  # noqa: E402
from engine.executors import make_executor, make_host, make_mtp_proposer  # noqa: E402
from engine.executors.cuda.draft_model import CudaDraftModel, CudaMtpLayer  # noqa: E402
from engine.executors.cuda.draft_runs import DraftRunGraphs, run_shape  # noqa: E402
from engine.executors.cuda.executor import CudaExecutor  # noqa: E402
from engine.executors.cuda.program import Outputs  # noqa: E402
from engine.executors.memory import allocate_cache  # noqa: E402
from engine.executors.speculation.draft_model import SHORT, DraftRow  # noqa: E402
from engine.executors.speculation.draft_slots import SlotSizes  # noqa: E402
from engine.executors.speculation.executor import SpeculativeExecutor, with_speculation  # noqa: E402
from engine.executors.speculation.model_proposer import DraftModelProposer  # noqa: E402
from engine.executors.speculation.mtp_proposer import MtpProposer  # noqa: E402
from engine.executors.speculation.policy import DraftPolicy  # noqa: E402
from engine.exporting.export import ExportOptions, export  # noqa: E402
from engine.exporting.manifest import Manifest  # noqa: E402
from engine.models.eagle3 import FILE  # noqa: E402
from engine.ops.cuda import attention  # noqa: E402
from engine.ops.cuda.drafted_tokens import DraftedTokens  # noqa: E402
from engine.settings.config import Config  # noqa: E402
from tests import eagle3_checkpoints, mtp_checkpoints  # noqa: E402
from tests.cuda.arrays import array  # noqa: E402
from tests.cuda.conftest import IS_INTERPRETED, ROOT  # noqa: E402
from tests.golden_arrays import golden  # noqa: E402
from tests.pure.executors.test_draft_model import check_answers, run  # noqa: E402
from tests.pure.executors.test_drafting import RandomPauses  # noqa: E402

# The interpreter tells of what a GPU does without a word.
pytestmark = [pytest.mark.filterwarnings(f"ignore:{what} encountered") for what in ("overflow", "invalid value")]
BLOCK_SIZE, NUM_DRAFTS = 16, 4
BASE = Config(
    max_dec_len=64,
    batch_size=8,
    max_num_batched_tokens=48,
    device="cpu",
    cudagraph_capture_sizes="1,2,4,8",
    batch_invariant=True,
    block_ratio=0.9,
    speculate_max_draft_token_num=NUM_DRAFTS,
)
MTP = ("glm4_moe", "ernie4_5_moe", "qwen3_5_text", "deepseek_v3", "glm4_moe_lite")
LAYERS = [*[("mtp", family) for family in MTP], ("eagle3", "llama"), ("eagle3", "qwen3")]


def export_mtp(folder: Path, out: Path, family: str, dtype: str, is_right: bool, num_ranks: int) -> None:  # noqa: PLR0913
    checkpoint = mtp_checkpoints.make_mtp_checkpoint(folder, family)
    if is_right:
        mtp_checkpoints.make_right(checkpoint, family)
    export(checkpoint, out, ExportOptions(dtype, block_size=BLOCK_SIZE, mtp=True, num_ranks=num_ranks))


def export_eagle3(folder: Path, out: Path, family: str, dtype: str, is_right: bool, num_ranks: int) -> None:  # noqa: PLR0913
    model = eagle3_checkpoints.make_model(folder / "model", family)
    head = eagle3_checkpoints.make_head(folder / "head", family, model)
    if is_right:
        eagle3_checkpoints.make_right(model, head)
    export(model, out, ExportOptions(dtype, block_size=BLOCK_SIZE, eagle3=str(head), num_ranks=num_ranks))


@pytest.fixture(scope="session")
def with_layer(tmp_path_factory):
    """Return a function that exports a model with its MTP layer or with an EAGLE-3 head. They are kept in build/golden,
    which can be copied to a machine without Paddle."""

    def make(method: str, family: str, dtype: str = "float32", is_right: bool = False, num_ranks: int = 1) -> Path:
        ranks = [f"{num_ranks}-ranks"] * (num_ranks > 1)
        out = ROOT / "build/golden" / "-".join([method, family, dtype, *["right"] * is_right, *ranks])
        if not out.exists():
            write = export_mtp if method == "mtp" else export_eagle3
            write(tmp_path_factory.mktemp(family) / "checkpoint", out, family, dtype, is_right, num_ranks)
        return out

    return make


def proposer_of(executor, model_dir, config, draft_dir=None):
    """Return the proposer for the model that `executor` runs, as the settings say."""
    model = Manifest.read(model_dir)
    if draft_dir is None:
        layer = CudaMtpLayer(executor.runner, executor.load_draft_graph(config.speculate_method), config)
        return MtpProposer(layer, model.vocab_size, config.speculate_method)
    sizes = SlotSizes.of(model, config.batch_size)
    return DraftModelProposer(CudaDraftModel.load(draft_dir, executor.runner, config, sizes), model.vocab_size)


@pytest.mark.parametrize(("method", "family"), LAYERS)
@pytest.mark.parametrize("use_cudagraph", [False] if IS_INTERPRETED else [False, True])
def test_drafts_behind_a_prompt_are_those_of_the_reference(method, family, use_cudagraph, with_layer, device):
    """The prompts are computed in chunks of 24 tokens, and then once more with what the prefix cache has of them."""
    graph_dir = with_layer(method, family)
    config = replace(BASE, speculate_method=method, use_cudagraph=use_cudagraph)
    executor = CudaExecutor(graph_dir, config, device.type)
    proposer = proposer_of(executor, graph_dir, config)
    drafting = with_speculation(executor, config, None, proposer)
    drafting.allocate(60)
    model, logits, drafts = proposer._model, [], []
    compute, wait, ids = model._graph._runs._program, model.wait, np.arange(executor._model.vocab_size)
    if (graph_dir / FILE).exists():
        ids = np.load(graph_dir / FILE)

    def program(inputs):
        outputs = compute(inputs)
        logits.extend(array(outputs.logits).copy())
        return outputs

    model._graph._runs._program = program
    model.wait = lambda: [made := wait(), drafts.extend(made)][0]
    known = golden(f"{method}/{family}")
    loop = EngineLoop(drafting, 60, replace(config, max_num_batched_tokens=24))
    for length in (3, 70) if IS_INTERPRETED else (3, 70, 70):
        prompt = known[f"prompt_{length}"].tolist()
        request = Request("0", list(prompt), length, Sampling(8, temperature=0))
        loop.add(request)
        logits.clear()
        drafts.clear()
        while not drafts:
            loop.step()
        assert request.token_ids[length] == known[f"first_{length}"]
        assert drafts[0] == known[f"tokens_{length}"].tolist()
        if not use_cudagraph:
            found = torch.log_softmax(torch.tensor(np.stack(logits[:NUM_DRAFTS])), -1).numpy()
            np.testing.assert_allclose(found, known[f"logprobs_{length}"], rtol=0, atol=1e-3)
            assert ids[found.argmax(1)].tolist() == drafts[0]
        while not loop.is_idle:
            loop.step()
    has_states = any(group.kind == STATE for group in executor.cache_groups)  # which are found inside a block, too
    assert loop.stats()["num_cached_tokens"] == (0 if IS_INTERPRETED else 69 if has_states else 64)
    drafting.close()


CASES = {
    "mtp, right": ("mtp", "glm4_moe", "float32", True, 400),
    "mtp, right, tiny pool": ("mtp", "glm4_moe", "float32", True, 14),
    "mtp, right, bfloat16": ("mtp", "glm4_moe", "bfloat16", True, 400),
    "mtp, wrong, with states": ("mtp", "qwen3_5_text", "float32", False, 400),
    "eagle3, right": ("eagle3", "qwen3", "float32", True, 400),
    "eagle3, right, tiny pool": ("eagle3", "qwen3", "bfloat16", True, 14),
    "eagle3, wrong": ("eagle3", "llama", "float32", False, 400),
    "draft, right": ("draft", "qwen2", "float32", True, 400),
    "draft, right, tiny pool": ("draft", "qwen2", "bfloat16", True, 14),
    "draft, wrong": ("draft", "llama3", "float32", False, 400),
}


@pytest.fixture
def models(exported, with_layer):
    """Return a function that returns the graph of a case, and that of its draft model."""

    def of(method, family, dtype, is_right):
        if method == "draft":
            return exported("qwen2", dtype, block_size=BLOCK_SIZE), exported(family, dtype, block_size=BLOCK_SIZE)
        return with_layer(method, family, dtype, is_right), None

    return of


class Replayed:
    """Stands for a captured graph where nothing can be captured: a replay launches everything anew."""

    def __init__(self, run):
        self.replay = run


@pytest.fixture
def capturing(device, monkeypatch):
    """Let draft models use captured graphs. The interpreter captures nothing, but replays have static inputs there."""
    if device.type == "cuda":
        return
    create = DraftRunGraphs.__init__
    fake = "engine.executors.cuda.graph_capture.GraphCapture"
    monkeypatch.setattr(fake, lambda device: lambda run: (Replayed(run), None))

    def with_shapes(graphs, runs, config, sizes, device):
        create(graphs, runs, config, sizes, device)
        graphs._shapes = [run_shape(count, sizes.max_drafts) for count in (2, 4) if config.use_cudagraph]

    monkeypatch.setattr(DraftRunGraphs, "__init__", with_shapes)


def placed(slots, num_tokens, num_blocks):
    """Return a batch in which requests take slots and blocks."""
    samplings = [Sampling(50, temperature=0.8 * (slot % 2), seed=slot, top_p=0.9) for slot in slots]
    blocks = [range(slot * num_blocks, (slot + 1) * num_blocks) for slot in slots]
    rows = [Row(slot, 0, [0] * num_tokens, [each]) for slot, each in zip(slots, blocks, strict=True)]
    return Batch(rows, [Arrival(*each, [0], 1, given) for each, given in zip(zip(slots), samplings, strict=True)])


@pytest.mark.usefixtures("capturing", "products_are_chains_of_sums")
@pytest.mark.parametrize(("method", "family"), [("draft", "qwen2"), ("eagle3", "qwen3"), ("mtp", "ernie4_5_moe")])
def test_replayed_runs_draft_what_launched_ones_do(method, family, models, device):
    """The first run has as many tokens as fit, the next ones fewer, and other numbers of rows."""
    graph_dir, draft_dir = models(method, family, "float32", False)
    found = []
    for use_cudagraph in (False, True):
        config = replace(BASE, speculate_method=method, use_cudagraph=use_cudagraph, cudagraph_capture_sizes="2,4")
        executor = CudaExecutor(graph_dir, config, device.type)
        model = proposer_of(executor, graph_dir, config, draft_dir)._model
        model.allocate(24)
        if use_cudagraph:
            model._graph._graphs.capture(24)
        for cache in model._graph._caches.tensors.values():
            cache.zero_()  # the rows below leave gaps
        model.place(placed([0, 1, 2, 3], 40, 6))
        if method != "draft":
            states = model._graph._runs.states
            states.copy_(torch.randn(states.shape, generator=torch.Generator().manual_seed(0)))
        drafts, replayed = [], []
        replay = model._graph._graphs._replay
        model._graph._graphs._replay = lambda *given: [replayed.append(1), replay(*given)]  # noqa: B023
        for lengths, start, depth in (([5, 5, 5, 5], 0, 4), ([1, 3], 5, 4), ([5, 1, 2], 14, 2), ([2], 20, 1)):
            rows = [
                DraftRow(slot, start, [7 * slot + n for n in range(length)], True, start, np.arange(1, length + 1))
                for slot, length in enumerate(lengths)
            ]
            drafts.append(model.run(rows, depth))
            assert [len(each) for each in drafts[-1]] == [depth] * len(lengths)
        assert len(replayed) == 4 * use_cudagraph
        found.append(drafts)
        executor.close()
    assert found[0] == found[1]


@pytest.mark.skipif(IS_INTERPRETED, reason="takes minutes with the interpreter")
@pytest.mark.parametrize("use_cudagraph", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_answers_with_drafts_are_those_without(case, use_cudagraph, models, device):
    """All drafts are verified. The second round finds the prompts of the first in the prefix cache."""
    method, family, dtype, is_right, num_blocks = CASES[case]
    graph_dir, draft_dir = models(method, family, dtype, is_right)
    config = replace(BASE, use_cudagraph=use_cudagraph)
    drafting = replace(config, speculate_method=method)
    executor = CudaExecutor(graph_dir, drafting, device.type)
    executor.allocate(400)
    expected, _ = run(executor, config, 400)
    proposer = proposer_of(executor, graph_dir, drafting, draft_dir)
    executor = with_speculation(executor, drafting, None, proposer)
    stats = check_answers(executor, (drafting, num_blocks), expected, is_right)
    assert stats[f"num_drafted_tokens/{method}/1"] > 0


def test_a_run_behind_a_step_gets_the_tokens_that_the_step_chooses(device):
    """The first row has two right drafts of three, the tokens of the second are known, the draft of the third is
    wrong."""

    def ids(values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=device)

    drafts, chosen = ids([50, 10, 30, 51, 11, 31, 52, 12, 32]), ids([10, 11, 13, 14, 40, 41, 0])
    inputs = {
        "token_ids": ids([0, 0, 0, 0, 7, 8, 0, 0]),
        "query_starts": ids([0, 4, 6, 8]),
        "logit_rows": ids([0, 5, 6]),
    }
    counters = ids([5, 6, 7], torch.int64)
    DraftedTokens(3, drafts, chosen).verify(ids([[0, -1, 4], [3, -1, 1], [1, -1, 2]]), inputs, counters)
    assert array(inputs["token_ids"]).tolist() == [10, 11, 13, 14, 7, 8, 40, 41]
    assert array(inputs["logit_rows"]).tolist() == [2, 5, 6]
    assert array(counters).tolist() == [7, 6, 7]


def answers(executor, config, num_blocks):
    """Return the answers to a greedy and to a seeded request, and the share of their drafts that was accepted."""
    loop, requests = EngineLoop(executor, num_blocks, config), []
    for index, temperature in enumerate((0.0, 0.9)):
        prompt = [(31 * index + 7 * n) % 300 for n in range(4 + 17 * index)]
        sampling = Sampling(8 if IS_INTERPRETED else 60, temperature=temperature, top_p=0.95, seed=index)
        requests.append(Request(str(index), prompt, len(prompt), sampling))
        loop.add(requests[-1])
    while not loop.is_idle:
        loop.step()
    stats = loop.stats()
    share = stats["num_accepted_tokens"] / max(stats["num_drafted_tokens"], 1)
    return [request.token_ids for request in requests], share


@pytest.mark.usefixtures("products_are_chains_of_sums")
@pytest.mark.parametrize(("method", "family"), [("mtp", "ernie4_5_moe"), ("eagle3", "qwen3"), ("draft", "qwen2")])
def test_captured_and_launched_drafts_are_right(method, family, models, device, monkeypatch):
    """The cache is as large as memory allows, so that all warm-up steps run. With the policy, the numbers of drafts
    differ from row to row. Most runs are launched before the tokens are known that they read."""
    graph_dir, draft_dir = models(method, family, "float32", True)
    replayed, replay = [], DraftRunGraphs._replay
    ahead, propose_ahead = [], DraftModelProposer.propose_ahead
    monkeypatch.setattr(
        DraftModelProposer, "propose_ahead", lambda *given: [ahead.append(propose_ahead(*given)), ahead[-1]][1]
    )
    monkeypatch.setattr(DraftRunGraphs, "_replay", lambda graphs, *given: [replayed.append(1), replay(graphs, *given)])
    executor = CudaExecutor(graph_dir, BASE, device.type)
    executor.allocate(40)
    expected, _ = answers(executor, BASE, 40)
    executor.close()
    for policy in (None,) if IS_INTERPRETED else (None, DraftPolicy(runs_ahead=True)):
        config = replace(BASE, speculate_method=method, block_bs=4.0)
        executor = CudaExecutor(graph_dir, config, device.type)
        drafting = with_speculation(executor, config, policy, proposer_of(executor, graph_dir, config, draft_dir))
        num_blocks = allocate_cache(drafting, config, Manifest.read(graph_dir).max_seq_len)
        found, share_accepted = answers(drafting, config, num_blocks)
        drafting.close()
        assert found == expected
        assert policy or share_accepted > 0.8
        assert sum(ahead) > (0 if IS_INTERPRETED else 5)
    assert bool(replayed) == (device.type == "cuda")


@pytest.mark.usefixtures("products_are_chains_of_sums")
@pytest.mark.parametrize("case", ["mtp, right", "eagle3, right", "draft, right", "mtp, wrong, with states"])
def test_steps_of_a_pause_change_no_answer(case, models, device, monkeypatch):
    """They are launched before the tokens of those before are known, on captured graphs if there are any. Drafts that
    are right stay right, as a layer reads the hidden states of these steps, too."""
    monkeypatch.setattr("engine.executors.speculation.mtp_proposer.MAX_PLAIN_STEPS", 3)
    method, family, dtype, is_right, _ = CASES[case]
    graph_dir, draft_dir = models(method, family, dtype, is_right)
    config, policy = replace(BASE, speculate_method=method), RandomPauses(0.7)
    executor = CudaExecutor(graph_dir, config, device.type)
    executor.allocate(400)
    expected = answers(executor, config, 400)[0] if IS_INTERPRETED else run(executor, config, 400)[0]
    drafting = SpeculativeExecutor(executor, NUM_DRAFTS, proposer_of(executor, graph_dir, config, draft_dir), policy)
    drafting.allocate(400)
    found = answers(drafting, config, 400)[0] if IS_INTERPRETED else run(drafting, config, 400, times=2)[0]
    assert found == expected
    assert policy.num_paused > (2 if IS_INTERPRETED else 20)
    counts = drafting.draft_counts.stats()
    drafted, accepted = (sum(counts[name] for name in counts if name.startswith(kind)) for kind in (DRAFTED, ACCEPTED))
    assert accepted > 0.8 * drafted or not is_right
    drafting.close()


@pytest.mark.skipif(IS_INTERPRETED, reason="the settings need a GPU")
@pytest.mark.parametrize(("method", "family"), [("mtp", "glm4_moe"), ("eagle3", "qwen3")])
def test_the_executor_of_the_settings_drafts(method, family, with_layer, device):
    graph_dir, found = with_layer(method, family, "float32", True), []
    for config in (replace(BASE, device="gpu"), replace(BASE, device="gpu", speculate_method=method)):
        executor = make_executor(graph_dir, config)
        executor.allocate(60)
        loop = EngineLoop(executor, 60, config)
        request = Request("0", [5, 6, 7], 3, Sampling(200, temperature=0))
        loop.add(request)
        while not loop.is_idle:
            loop.step()
        found.append(request.token_ids)
        executor.close()
    assert found[0] == found[1]
    assert loop.stats()[f"num_drafted_tokens/{method}/1"] > 0


@pytest.mark.usefixtures("products_are_chains_of_sums")
@pytest.mark.parametrize("use_cudagraph", [True] if IS_INTERPRETED else [True, False])
@pytest.mark.parametrize(("method", "family"), [("mtp", "glm4_moe"), ("eagle3", "qwen3")])
def test_each_rank_has_its_share_of_the_layer_that_drafts(method, family, use_cudagraph, with_layer, two_devices):
    """The second round finds the prompts of the first in the prefix cache. Drafts are accepted only if all ranks have
    read the same tokens and states."""
    graph_dir, found = with_layer(method, family, "float32", True, num_ranks=2), []
    config = replace(BASE, device="gpu", mp_num=2, batch_invariant=False, use_cudagraph=use_cudagraph)
    drafting = replace(config, speculate_method=method)
    executor = make_host(graph_dir, drafting)
    proposer = make_mtp_proposer(executor, Manifest.read(graph_dir), drafting)
    for each in (executor, with_speculation(executor, drafting, None, proposer)):
        each.allocate(40)
        loop, requests = EngineLoop(each, 40, config if each is executor else drafting), []
        for _ in range(1 if IS_INTERPRETED else 2):
            for number in range(2):
                prompt = [(31 * number + 7 * n) % 300 for n in range(4 + 17 * number)]
                sampling = Sampling(8 if IS_INTERPRETED else 60, temperature=0)
                requests.append(Request(str(len(requests)), prompt, len(prompt), sampling))
                loop.add(requests[-1])
            while not loop.is_idle:
                loop.step()
        found.append([request.token_ids for request in requests])
    each.close()
    assert found[0] == found[1]
    assert loop.stats()["num_accepted_tokens"] > len(requests) * (4 if IS_INTERPRETED else 30)


class Noting:
    """Stands for a kernel: it notes the last arguments of a launch, for which a kernel is compiled, and computes
    nothing."""

    def __init__(self, num_constants, found):
        self._num_constants, self._found = num_constants, found

    def __getitem__(self, grid):
        return lambda *given, num_warps, **options: self._found.add((*given[-self._num_constants :], num_warps))


@pytest.mark.skipif(not IS_INTERPRETED, reason="it needs no GPU; there the next test compiles")
def test_the_warm_up_has_every_variant_of_attention_that_a_run_needs(models, device, monkeypatch):
    """Runs of one row and of two, from one token to more than a captured run has, at several lengths of the context."""
    graph_dir, draft_dir = models("draft", "qwen2", "float32", False)
    config = replace(BASE, batch_size=2, speculate_method="draft", batch_invariant=False)
    executor = CudaExecutor(graph_dir, config, device.type)
    model, found = proposer_of(executor, graph_dir, config, draft_dir)._model, set()
    model.allocate(2)
    draft_graph = model._graph

    def program(inputs):
        count, starts = len(inputs["token_ids"]), inputs["query_starts"]
        where = starts, inputs["context_lens"], inputs["block_tables"]
        cache, qkv = next(iter(draft_graph._caches.tensors.values())), torch.zeros(count, 4 * 16)
        attention.paged_attention(
            qkv, qkv, cache, *where, num_heads=cache.shape[2], num_kv_heads=cache.shape[2], scale=1
        )
        return Outputs(torch.zeros(count if inputs["logit_rows"] is None else len(inputs["logit_rows"]), 300), qkv)

    monkeypatch.setattr(attention, "rotate_and_cache", lambda qkv, *_: qkv)
    monkeypatch.setattr(attention, "_attend", Noting(15, found))
    monkeypatch.setattr(attention, "combine", Noting(1, found))
    draft_graph._runs._program = program
    draft_graph._warm_up()
    warm = set(found)
    assert len([each for each in warm if len(each) == 2]) > 1  # a context is shared by several numbers of programs
    longest = model.max_seq_len - NUM_DRAFTS - SHORT
    for start in [0, *(2**power + 1 for power in range(5, 10)), longest]:
        for length in (1, 2, NUM_DRAFTS + 1, SHORT):
            rows = [DraftRow(slot, start, [0] * length, True, 0) for slot in (0, 1)]
            model.run(rows[:1], NUM_DRAFTS)
            model.run(rows, NUM_DRAFTS)
    assert found == warm


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(("method", "family"), [("draft", "qwen2"), ("eagle3", "qwen3"), ("mtp", "glm4_moe")])
def test_no_kernel_is_compiled_after_the_warm_up(method, family, models, device, caplog):
    graph_dir, draft_dir = models(method, family, "bfloat16", method != "draft")
    config = replace(BASE, speculate_method=method, batch_invariant=False, block_bs=4.0)
    executor = CudaExecutor(graph_dir, config, device.type)
    proposer = proposer_of(executor, graph_dir, config, draft_dir)
    drafting = with_speculation(executor, config, DraftPolicy(runs_ahead=True), proposer)
    num_blocks = allocate_cache(drafting, config, Manifest.read(graph_dir).max_seq_len)
    loop, longest = EngineLoop(drafting, num_blocks, config), Manifest.read(graph_dir).max_seq_len - 70
    with caplog.at_level(logging.WARNING):
        for number in range(40):
            length, sampling = 1 + number * 37 % longest, Sampling(8 + 2 * number % 60, temperature=0.8 * (number % 2))
            loop.add(Request(str(number), [3 + number] * length, length, sampling), replay=True)
            for _ in range(5):
                loop.step()
        while not loop.is_idle:
            loop.step()
    drafting.close()
    assert [record.getMessage() for record in caplog.records] == []
