"""What an exported model says of itself, and what is said of a folder that is none."""

import json
import shutil

import pytest

from engine.exporting.cache import export_cached
from engine.exporting.export import ExportOptions, export
from engine.exporting.exported import GRAPH_VERSION, ExportedModel
from engine.models.keys import ModelError

MODEL = ExportedModel(vocab_size=320, block_size=16, max_seq_len=64, dtype="bfloat16")
CHECKPOINT_KEYS = {"model_type": "qwen2", "vocab_size": 320}


def write_model(directory, keys=None, files=("rank_0/model.json", "rank_0/model.pdiparams")):
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CHECKPOINT_KEYS | (keys or MODEL.keys())))
    for name in files:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).touch()
    return directory


def test_what_was_written_is_read(tmp_path):
    assert ExportedModel.read(write_model(tmp_path / "model")) == MODEL


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, r"model/config\.json is missing"),
        ("{", r"model/config\.json is not JSON"),
        ("{}", r"model is not an exported model: config\.json has no infer_model_graph_version"),
        *(
            (json.dumps({key: v for key, v in {"vocab_size": 9, **MODEL.keys()}.items() if key != name}), message)
            for name, message in {
                "vocab_size": r"model/config\.json: vocab_size is missing; export the model again",
                "infer_model_block_size": r"model/config\.json: infer_model_block_size is missing",
                "infer_model_max_seq_len": r"model/config\.json: infer_model_max_seq_len is missing",
                "infer_model_dtype": r"model/config\.json: infer_model_dtype is None, it must be float32 or bfloat16",
                "infer_model_num_ranks": r"model/config\.json: infer_model_num_ranks is missing",
            }.items()
        ),
    ],
)
def test_what_config_json_lacks_is_named_with_its_path(config, message, tmp_path):
    (tmp_path / "model").mkdir()
    if config is not None:
        (tmp_path / "model/config.json").write_text(config)
    with pytest.raises(ModelError, match=message):
        ExportedModel.read(tmp_path / "model")


@pytest.fixture(
    params=[
        lambda path, out: ExportedModel.read(path),
        lambda path, out: export(path, out, ExportOptions()),
        lambda path, out: export_cached(path, out, ExportOptions()),
    ],
    ids=["read", "export", "export_cached"],
)
def use(request, tmp_path):
    """Takes a folder as a model, in each way there is."""
    return lambda path: request.param(path, tmp_path / "out")


def test_a_graph_of_another_version_of_this_server_is_to_be_exported_again(use, tmp_path):
    path = write_model(tmp_path / "model", MODEL.keys() | {"infer_model_graph_version": 1})
    message = f"model is a static graph of version 1 of this server, which reads version {GRAPH_VERSION}; export it"
    with pytest.raises(ModelError, match=message):
        use(path)


@pytest.mark.parametrize(
    "files", [["model.pdmodel", "model.pdiparams"], ["rank_0/model.pdiparams"], ["model.json", "model.pdiparams"]]
)
@pytest.mark.parametrize("with_config", [True, False])
def test_a_graph_of_another_program_is_called_one(files, with_config, use, tmp_path):
    path = write_model(tmp_path / "model", {"infer_model_max_seq_len": 64}, files)
    if not with_config:
        (path / "config.json").unlink()
    with pytest.raises(ModelError, match="model is a static graph of another program.* checkpoint is needed"):
        use(path)


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
    assert ExportedModel.read(tmp_path / "out").vocab_size == 320
