"""Tests of the manifest of an exported model, and of the errors for a folder that has none."""

import json
import shutil

import pytest

from engine.core.cache_groups import CacheGroup
from engine.exporting.cache import export_cached
from engine.exporting.export import ExportOptions, export
from engine.exporting.manifest import GRAPH_VERSION, GraphManifest, Manifest
from engine.models.config_fields import ModelError
from engine.models.kv_cache import ATTENTION_AXES, CacheSpec

CACHE = CacheSpec("cache of layer 0", "bfloat16", (-1, 2, 1, 16, 8), ATTENTION_AXES)
GRAPH = GraphManifest(
    "model.json",
    "model.pdiparams",
    ("token_ids",),
    ("logits", "hidden"),
    (CACHE,),
    (CacheGroup("sliding_window", 8),),
)
MODEL = Manifest(320, 64, 16, 1, "bfloat16", {"decoder": GRAPH})
CHECKPOINT_KEYS = {"model_type": "qwen2", "vocab_size": 320}


def write_model(directory, keys=None, files=("rank_0/model.json", "rank_0/model.pdiparams")):
    """Write a model with `keys` in config.json and no manifest, or like ours."""
    directory.mkdir()
    if keys is None:
        MODEL.write(directory)
    (directory / "config.json").write_text(json.dumps(CHECKPOINT_KEYS | (keys or MODEL.config_keys())))
    for name in files:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).touch()
    return directory


def test_a_written_manifest_is_read_unchanged(tmp_path):
    assert Manifest.read(write_model(tmp_path / "model")) == MODEL


def test_a_cache_says_what_its_blocks_need():
    assert CACHE.shape_of(7) == (7, 2, 1, 16, 8)
    assert CACHE.block_bytes == 2 * 16 * 8 * 2
    assert CACHE.block_size == 16


def test_a_graph_the_model_does_not_have_is_named_beside_those_it_has():
    assert MODEL.graph() is GRAPH
    with pytest.raises(ModelError, match="the model has no graph 'draft', only decoder"):
        MODEL.graph("draft")


def without(*path):
    """Return a function that removes a key from the document."""

    def change(document):
        for name in path[:-1]:
            document = document[name]
        del document[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            without("vocab_size"),
            r"model/manifest\.json: .* missing required field `vocab_size`; export the model again",
        ),
        (without("graphs"), r"missing required field `graphs`"),
        (without("graphs", "decoder", "outputs"), r"missing required field `outputs` - at `\$\.graphs\[\.\.\.\]`"),
        (without("graphs", "decoder", "caches", 0, "axes"), r"field `axes` - at `\$\.graphs\[\.\.\.\]\.caches\[0\]`"),
        (lambda d: d.update(num_ranks="2"), r"Expected `int`, got `str` - at `\$\.num_ranks`"),
        (lambda d: d.update(num_ranks=True), r"Expected `int`, got `bool` - at `\$\.num_ranks`"),
        (lambda d: d.update(weight_format=None), r"Expected `str`, got `null` - at `\$\.weight_format`"),
        (lambda d: d.update(graphs=[]), r"Expected `object`, got `array` - at `\$\.graphs`"),
        (lambda d: d.update(graphs={"decoder": 7}), r"Expected `object`, got `int` - at `\$\.graphs\[\.\.\.\]`"),
        (lambda d: d["graphs"]["decoder"].update(inputs={}), r"Expected `array`, got `object` - at .*\.inputs`"),
        (lambda d: d["graphs"]["decoder"].update(inputs=[7]), r"Expected `str`, got `int` - at .*\.inputs\[0\]`"),
    ],
)
def test_a_wrong_manifest_is_refused_with_the_path_of_the_error(change, message, tmp_path):
    path = write_model(tmp_path / "model") / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ModelError, match=message):
        Manifest.read(tmp_path / "model")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, r"model/config\.json is missing"),
        ("{", r"model/config\.json is not JSON"),
        ("{}", r"model is not an exported model: it has no manifest\.json"),
    ],
)
def test_a_folder_without_an_exported_model_is_refused_with_the_reason(config, message, tmp_path):
    (tmp_path / "model").mkdir()
    if config is not None:
        (tmp_path / "model/config.json").write_text(config)
    with pytest.raises(ModelError, match=message):
        Manifest.read(tmp_path / "model")


@pytest.fixture(
    params=[
        lambda path, out: Manifest.read(path),
        lambda path, out: export(path, out, ExportOptions()),
        lambda path, out: export_cached(path, out, ExportOptions()),
    ],
    ids=["read", "export", "export_cached"],
)
def use(request, tmp_path):
    """Return a function that loads a folder as a model, in each possible way."""
    return lambda path: request.param(path, tmp_path / "out")


def test_a_graph_of_an_older_version_of_this_server_is_to_be_exported_again(use, tmp_path):
    path = write_model(tmp_path / "model", MODEL.config_keys() | {"infer_model_graph_version": 2})
    message = f"model is a static graph of version 2 of this server, which reads version {GRAPH_VERSION}; export it"
    with pytest.raises(ModelError, match=message):
        use(path)


def test_a_manifest_that_was_lost_is_missed(use, tmp_path):
    path = write_model(tmp_path / "model")
    (path / "manifest.json").unlink()
    with pytest.raises(ModelError, match=r"model/manifest\.json is missing"):
        use(path)


def test_a_graph_of_a_newer_version_is_refused_whatever_its_manifest_holds(use, tmp_path):
    path = write_model(tmp_path / "model")
    (path / "manifest.json").write_text(json.dumps({"version": GRAPH_VERSION + 1, "experts": 8}))
    with pytest.raises(ModelError, match=f"model is a static graph of version {GRAPH_VERSION + 1} of this server"):
        use(path)


@pytest.mark.parametrize(
    "files", [["model.pdmodel", "model.pdiparams"], ["rank_0/model.pdiparams"], ["model.json", "model.pdiparams"]]
)
def test_a_graph_of_another_program_is_called_one(files, tmp_path):
    path = write_model(tmp_path / "model", {"model_type": "gpt2"}, files)
    with pytest.raises(ModelError, match="model is not an exported model: it has no manifest.json"):
        Manifest.read(path)
    with pytest.raises(ModelError, match="model is a PaddleNLP export of 'gpt2', a family that is not supported"):
        export(path, tmp_path / "out", ExportOptions())


@pytest.mark.parametrize("start", [export, export_cached])
def test_an_exported_model_is_no_checkpoint(start, tmp_path):
    path = write_model(tmp_path / "model")
    with pytest.raises(ModelError, match="is an exported graph, a Hugging Face checkpoint is expected"):
        start(path, tmp_path / "out", ExportOptions())
    shutil.rmtree(path / "rank_0")
    with pytest.raises(ModelError, match=r"is an exported graph, but rank_0/model\.json is missing; export it again"):
        start(path, tmp_path / "out", ExportOptions())


def test_a_checkpoint_may_have_such_files_beside_its_weights(a_checkpoint, tmp_path, no_paddle):
    (a_checkpoint / "rank_0").mkdir()
    export(a_checkpoint, tmp_path / "out", ExportOptions())
    assert Manifest.read(tmp_path / "out").vocab_size == 320
