"""A checkpoint from the hub: the needed files only, verified, with the token where it belongs."""

import shutil
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace

import pytest

from download_model import DownloadError, DownloadOptions, Policy, download
from engine.download.sources import NEEDED
from engine.download.transfer import Stop
from engine.exporting.export import COPIED_FILES
from tests.pure.download.models import CHECKPOINT, FAST, NAME, UNNEEDED, WEIGHTS, cdn_url, files_in
from tests.pure.model_server import TOKEN, Fault, ModelServer


def test_the_server_of_these_tests_is_one_that_huggingface_hub_understands(server, hub, tmp_path):
    from huggingface_hub import snapshot_download

    where = snapshot_download(
        "an-org/a-model", local_dir=tmp_path / "copy", cache_dir=tmp_path / "cache", endpoint=server.url
    )
    shutil.rmtree(tmp_path / "copy/.cache")
    assert files_in(Path(where)) == CHECKPOINT | UNNEEDED


def test_a_checkpoint_arrives_with_the_needed_files_only(hub, tmp_path):
    done = download(NAME, tmp_path, hub)
    assert done.model_dir == tmp_path / NAME
    assert (done.quant, done.is_static, done.num_fetched) == ("weight_only_int8", False, len(CHECKPOINT))
    assert files_in(done.model_dir) == CHECKPOINT


@pytest.mark.parametrize(
    "name",
    [
        *("DeepSeek-R1/weight_only_int4", "DeepSeek-R1-2nodes/weight_only_int8", "DeepSeek-R1-MTP/a8w8_fp8_wint4"),
        *("DeepSeek-R1-MTP-2nodes/a8w8_fp8", "DeepSeek-R1/a8w8_fp8_wint4"),
    ],
)
def test_the_names_of_static_graphs_lead_to_the_checkpoint_and_its_family(name, server, tmp_path):
    server.add_repo("deepseek-ai/DeepSeek-R1", CHECKPOINT | {"config.json": b'{"model_type": "of the future"}'})
    with pytest.raises(DownloadError, match="model_type is 'of the future', supported are .*; nothing else of the"):
        download(f"deepseek-ai/{name}", tmp_path, DownloadOptions(hub_endpoint=server.url, policy=FAST))


def test_a_second_run_asks_the_hub_for_the_list_only(server, hub, tmp_path):
    download(NAME, tmp_path, hub)
    server.requests.clear()
    assert download(NAME, tmp_path, hub).num_fetched == 0
    assert server.requests == [("GET", "/api/models/an-org/a-model", None)]


def test_another_quantization_shares_the_weights_on_disk(server, hub, tmp_path):
    first = download(NAME, tmp_path, hub).model_dir
    server.requests.clear()
    done = download("an-org/a-model", tmp_path, hub)
    assert files_in(first) == CHECKPOINT and done.quant is None
    assert [path for _, path, _ in server.requests if path.startswith("/cdn/")] == []
    weights = "model-00001-of-00002.safetensors"
    assert (done.model_dir / weights).samefile(first / weights)


def test_a_weight_file_of_the_hub_is_resumed_too(server, hub, tmp_path):
    server.faults[cdn_url(WEIGHTS)] = [Fault(cut_after=100_000), *[Fault(status=503)] * (FAST.num_tries - 1)]
    with pytest.raises(DownloadError, match="model-00001-of-00002.safetensors: HTTP 503"):
        download(NAME, tmp_path, hub)
    server.requests.clear()
    assert files_in(download(NAME, tmp_path, hub).model_dir) == CHECKPOINT
    assert server.ranges_of(cdn_url(WEIGHTS)) == ["bytes=100000-"]


@pytest.mark.parametrize(
    ("path", "kind"), [("model-00001-of-00002.safetensors", "sha256"), ("config.json", "git-sha1")]
)
def test_every_file_of_the_hub_is_compared_with_its_checksum(path, kind, server, hub, tmp_path):
    url = server.hub_path("an-org/a-model", path)
    right = CHECKPOINT[path]
    server.faults[server.redirects.get(url, url)] = [Fault(body=bytes(len(right)))] * 2
    with pytest.raises(DownloadError, match=f"{path}: {kind} is .*, expected"):
        download(NAME, tmp_path, hub)
    assert not (tmp_path / NAME / path).exists()


def test_no_more_is_read_than_the_hub_has_announced(server, hub, tmp_path):
    config = server.hub_path("an-org/a-model", "config.json")
    server.faults[config] = [Fault(body=bytes(64 << 20))] * 2
    with pytest.raises(DownloadError, match="config.json: the server sends more than its 162 bytes"):
        download(NAME, tmp_path, hub)


def test_the_token_opens_a_private_model(server, hub, tmp_path, monkeypatch):
    server.private.add("an-org/a-model")
    with pytest.raises(DownloadError, match="no such model, or a private one and HF_TOKEN"):
        download(NAME, tmp_path, hub)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    download(NAME, tmp_path, hub)
    weights = server.hub_path("an-org/a-model", "model-00001-of-00002.safetensors")
    assert server.tokens[weights] == f"Bearer {TOKEN}"


def test_a_model_that_only_some_may_read_says_how(server, hub, tmp_path):
    server.closed.add(server.hub_path("an-org/a-model", "config.json"))
    with pytest.raises(DownloadError, match="^config.json: HTTP 401 Access is restricted; set HF_TOKEN to a token"):
        download(NAME, tmp_path, hub)
    server.closed.add("/api/models/an-org/a-model")
    with pytest.raises(DownloadError, match="^an-org/a-model on .*: access is granted on request.*set HF_TOKEN"):
        download(NAME, tmp_path, hub)
    server.faults["/api/models/an-org/a-model"] = [Fault(status=403)]
    with pytest.raises(DownloadError, match="^an-org/a-model on .*: HTTP 403; set HF_TOKEN to a token"):
        download(NAME, tmp_path, hub)


def test_the_token_follows_a_redirect_on_the_same_server_and_to_no_other(server, hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    config = server.hub_path("an-org/a-model", "config.json")
    tokenizer = server.hub_path("an-org/a-model", "tokenizer.json")
    with ModelServer() as other:
        server.moved = {config: (307, "/cache/config"), tokenizer: (307, f"{other.url}/tokenizer")}
        server.contents["/cache/config"] = CHECKPOINT["config.json"]
        server.closed.add("/cache/config")
        other.contents["/tokenizer"] = CHECKPOINT["tokenizer.json"]
        assert files_in(download(NAME, tmp_path, hub).model_dir) == CHECKPOINT
        assert other.tokens == {"/tokenizer": None}


def test_a_static_models_name_finds_the_checkpoint_it_was_made_from(hub, tmp_path):
    done = download("an-org/a-model-MTP-2nodes/a8w8_fp8", tmp_path, hub)
    assert files_in(done.model_dir) == CHECKPOINT
    assert done.model_dir == tmp_path / "an-org/a-model-MTP-2nodes/a8w8_fp8"


def test_a_busy_hub_is_asked_again(server, hub, tmp_path):
    server.faults["/api/models/an-org/a-model"] = [Fault(status=500), Fault(status=429)]
    assert files_in(download(NAME, tmp_path, hub).model_dir) == CHECKPOINT


def test_a_name_that_the_hub_does_not_know_is_asked_for_once(server, hub, tmp_path):
    with pytest.raises(DownloadError, match="an-org/other on http://.*: no such model"):
        download("an-org/other", tmp_path / "models", hub)
    assert len(server.requests) == 1
    assert list(tmp_path.iterdir()) == []  # no folder and no lock file of a mistyped name
    (tmp_path / "models" / "an-org").mkdir(parents=True)
    with pytest.raises(DownloadError, match="no such model"):
        download("an-org/other", tmp_path / "models", hub)
    assert list((tmp_path / "models").rglob("*")) == [tmp_path / "models" / "an-org"]


def test_an_answer_that_no_hub_would_give_fails_at_once_with_its_address(server, hub, tmp_path):
    server.faults["/api/models/an-org/a-model"] = [Fault(body=b"<html>Please log in</html>")]
    with pytest.raises(DownloadError, match=f"^{NAME.rpartition('/')[0]} on {server.url}: "):
        download(NAME, tmp_path, hub)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("path", "key"), [("config.json", "size"), ("config.json", "blobId"), ("model-00001-of-00002.safetensors", "size")]
)
def test_a_file_that_could_not_be_verified_is_refused(path, key, server, hub, tmp_path):
    server.edit = lambda row: {k: v for k, v in row.items() if row["rfilename"] != path or k != key}
    with pytest.raises(DownloadError, match=f"no size and checksum for {path}"):
        download(NAME, tmp_path, hub)


@pytest.mark.parametrize(
    ("missing", "message"),
    [("config.json", "no config.json"), ("model-0000", "no safetensors weights")],
)
def test_a_repository_that_cannot_be_exported_is_refused(missing, message, server, hub, tmp_path):
    kept = {path: body for path, body in CHECKPOINT.items() if not path.startswith(missing)}
    server.add_repo("an-org/odd", kept | UNNEEDED)
    with pytest.raises(DownloadError, match=message):
        download("an-org/odd", tmp_path, hub)


def test_weights_of_paddle_are_fetched_where_there_are_no_others(server, hub, tmp_path):
    others = {path: body for path, body in CHECKPOINT.items() if not path.startswith("model")}
    in_paddle = {"model_state.pdparams.index.json": b"{}", "model_state-00001-of-00001.pdparams": WEIGHTS}
    server.add_repo("an-org/in-paddle", others | in_paddle | {"optimizer.pdopt": b"", "x.pdparams": b""})
    assert files_in(download("an-org/in-paddle", tmp_path, hub).model_dir) == others | in_paddle
    server.add_repo("an-org/both", CHECKPOINT | in_paddle)
    assert files_in(download("an-org/both", tmp_path, hub).model_dir) == CHECKPOINT


def test_a_draft_model_is_not_to_be_had_from_the_hub(server, hub, tmp_path):
    with pytest.raises(DownloadError, match="speculate_model_path is for a mirror"):
        download(NAME, tmp_path, replace(hub, speculate_dir=str(tmp_path)))
    assert server.requests == []


def test_too_little_space_is_reported_before_anything_is_downloaded(server, hub, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=250_000))
    with pytest.raises(DownloadError, match="1 MB needed, 0 MB are free"):
        download(NAME, tmp_path, hub)
    assert not any("safetensors" in path for _, path, _ in server.requests)


def test_a_checkpoint_of_an_unknown_family_is_refused_before_anything_but_its_config_is_fetched(server, hub, tmp_path):
    server.add_repo("an-org/a-model", CHECKPOINT | {"config.json": b'{"model_type": "no_such_family"}'})
    with pytest.raises(DownloadError, match="^config.json: model_type is 'no_such_family', supported are llama, "):
        download(NAME, tmp_path, hub)
    assert [path for method, path, _ in server.requests[1:]] == [server.hub_path("an-org/a-model", "config.json")]
    server.add_repo("an-org/a-model", CHECKPOINT)
    assert download(NAME, tmp_path, hub).num_fetched == len(CHECKPOINT)
    assert files_in(tmp_path / NAME) == CHECKPOINT


def test_a_hub_that_cannot_be_reached_is_reported_at_once_and_given_up_soon(hub, tmp_path, caplog, monkeypatch):
    waits = []
    monkeypatch.setattr(Stop, "wait", lambda _, seconds: waits.append(seconds))
    with ModelServer() as ended:
        pass
    with pytest.raises(DownloadError, match="refused.*3 tries"), caplog.at_level("INFO", "engine.download"):
        download(NAME, tmp_path, replace(hub, hub_endpoint=ended.url, policy=Policy()))
    assert sum(waits) <= 3
    assert "refused; trying again in 1 s" in caplog.messages[0].lower()


def test_a_hub_that_cannot_be_reached_is_an_error_the_first_time_only(hub, tmp_path):
    with ModelServer() as ended:
        pass
    nowhere = replace(hub, hub_endpoint=ended.url)
    with pytest.raises(DownloadError, match=f"an-org/a-model on {ended.url}: .*refused"):
        download(NAME, tmp_path, nowhere)
    download(NAME, tmp_path, hub)
    assert download(NAME, tmp_path, nowhere).num_fetched == 0


def test_every_file_that_the_export_copies_is_downloaded():
    assert [name for name in COPIED_FILES if not any(fnmatchcase(name, each) for each in NEEDED)] == []
