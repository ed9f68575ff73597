"""A model of several graphs: all are exported, and each is loaded by its name."""

from dataclasses import replace

import numpy as np
import pytest

from engine.exporting.export import ExportOptions, export
from engine.exporting.manifest import DECODER, Manifest
from engine.graph import load
from engine.graph.run import run_graph
from engine.models.config import DecoderConfig
from engine.models.config_fields import ModelError
from engine.ops import reference
from engine.settings.config import Config
from tests.checkpoints import make_checkpoint
from tests.paged_model import make_caches

DRAFT = "draft"
STEP = {
    "token_ids": [5, 6, 7],
    "positions": [0, 1, 2],
    "query_starts": [0, 3],
    "context_lens": [0],
    "block_tables": [[1]],
    "logit_rows": [1, 2],
}


@pytest.fixture(scope="module")
def graph_dir(tmp_path_factory):
    """Return a model whose second graph is its first layer alone, between the same table and the same norm."""

    def networks(self, shard):
        return {DECODER: self.network(shard), DRAFT: replace(self, num_layers=1).network(shard)}

    directory = tmp_path_factory.mktemp("several")
    checkpoint = make_checkpoint(directory / "checkpoint", "llama", seed=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecoderConfig, "networks", networks)
        export(checkpoint, directory / "out", ExportOptions(block_size=16))
    return directory / "out"


def test_every_graph_has_its_files_and_its_own_caches(graph_dir):
    manifest = Manifest.read(graph_dir)
    files = {"model.json", "model.pdiparams", "draft.json", "draft.pdiparams"}
    assert {path.name for path in (graph_dir / "rank_0").iterdir()} == files
    assert [len(manifest.graph(name).caches) for name in (DECODER, DRAFT)] == [3, 1]
    assert manifest.missing_files(graph_dir) == []
    assert len(load(graph_dir, name=DRAFT)[0].nodes) < len(load(graph_dir)[0].nodes)


def test_the_cpu_executor_loads_another_graph_by_its_name(graph_dir):
    from engine.executors.cpu.executor import CpuExecutor

    executor, files = CpuExecutor(graph_dir, Config(block_bs=1)), Manifest.read(graph_dir).graph(DRAFT)
    inputs = {name: np.array(values, np.int32) for name, values in STEP.items()}
    program, caches = executor.load_graph(DRAFT), make_caches(files.caches, 2)
    program.set_caches(caches)
    found = program.run(inputs)["logits"]
    expected = run_graph(*load(graph_dir, name=DRAFT), inputs | make_caches(files.caches, 2), reference)["logits"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)
    assert not any(np.isnan(caches[files.caches[0].name][1, :, :, :3]).ravel())
    with pytest.raises(ModelError, match="the model has no graph 'vision', only decoder, draft"):
        executor.load_graph("vision")
    executor.close()
