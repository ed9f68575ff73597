"""download_model against local servers: what arrives, what is asked for, and what happens when it breaks."""

import errno
import fcntl
import hashlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from model_server import TOKEN, Fault, ModelServer

import download_model
from download_model import DownloadError, Options, Policy, download, find_download, parse_model_name
from engine.download.transfer import Stop

ROOT = Path(__file__).parents[2]
NAME = "an-org/a-model/weight_only_int8"
FOLDER = f"models/static/3.0.0.b4/{NAME}"
WEIGHTS = random.Random(0).randbytes(300_000)
STATIC = {
    "config.json": b'{"model_type": "llama"}',
    "rank_0/model.json": b"{}",
    "rank_0/model.pdiparams": WEIGHTS,
}
CHECKPOINT = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "model-00001-of-00002.safetensors": WEIGHTS,
    "model-00002-of-00002.safetensors": WEIGHTS[::-1],
}
UNNEEDED = {
    "README.md": b"# A model",
    "pytorch_model.bin": b"pickles",
    "consolidated.safetensors": b"the same again",
    "a-model.Q4.gguf": b"other format",
    "original/tokenizer.model": b"other layout",
    "onnx/model.safetensors": b"other layout",
}
FAST = Policy(num_tries=3, backoff_s=0.001, timeout_s=5)


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch, tmp_path):
    """Neither the operator's settings nor a token of the machine has a say."""
    for name in list(os.environ):
        if name.startswith("HF_") or name.lower().endswith("_proxy") or name in ("MODEL_MIRROR", "tag"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))


@pytest.fixture
def server():
    with ModelServer() as running:
        yield running


@pytest.fixture
def mirror(server):
    server.add_folder(f"{FOLDER}/model", STATIC)
    return Options(mirror=f"{server.url}/models/static", policy=FAST)


@pytest.fixture
def hub(server):
    server.add_repo("an-org/a-model", CHECKPOINT | UNNEEDED)
    return Options(hub_endpoint=server.url, policy=FAST)


def files_in(root: Path) -> dict[str, bytes]:
    """Everything there but the download's own notes."""
    notes = ("download.json", ".download.lock")
    found = (path for path in root.rglob("*") if path.is_file() and path.name not in notes)
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in found}


def weights_url(part="model") -> str:
    return f"/{FOLDER}/{part}/rank_0/model.pdiparams"


def cdn_url(body: bytes) -> str:
    return f"/cdn/{hashlib.sha256(body).hexdigest()}"


# names and options


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", ("Qwen/Qwen2.5-0.5B-Instruct", None)),
        ("deepseek-ai/DeepSeek-R1/weight_only_int4", ("deepseek-ai/DeepSeek-R1", "weight_only_int4")),
        ("deepseek-ai/DeepSeek-R1-2nodes/a8w8_fp8", ("deepseek-ai/DeepSeek-R1-2nodes", "a8w8_fp8")),
    ],
)
def test_a_model_name_is_split_into_repository_and_quantization(name, parsed):
    assert parse_model_name(name) == parsed


def test_an_unknown_quantization_is_refused_with_the_list_of_the_known():
    with pytest.raises(DownloadError, match="'int3'.*weight_only_int8, weight_only_int4, a8w8, .*float32"):
        parse_model_name("an-org/a-model/int3")


@pytest.mark.parametrize(
    "name",
    ["", "model", "/etc/passwd", "../a", "a/..", "a/b/../c", "a//b", "a/b?c", "a/b c", "a\\b/c", "a/b\n"],
)
def test_a_model_name_that_is_no_name_is_refused(name):
    with pytest.raises(DownloadError, match="model_name is .* it must be org/model"):
        parse_model_name(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nnodes": 0}, "nnodes is 0, it must be at least 1"),
        ({"nnodes": 3}, "nnodes is 3: .* folders for one node .* two"),
        ({"mode": "leader"}, "mode is 'leader'"),
        ({"mirror": "file:///etc"}, "MODEL_MIRROR is 'file:///etc'"),
        ({"tag": "../.."}, "tag is '../..'"),
    ],
)
def test_an_impossible_option_is_refused_by_name_and_value(changes, message, mirror, server, tmp_path):
    with pytest.raises(DownloadError, match=message):
        download(NAME, tmp_path, replace(mirror, **changes))
    assert server.requests == []


@pytest.mark.parametrize(
    "url",
    ["hub.example", "http://", "http://[::1", "http://a b", "http://h:99999", "http://h/?a=1", "ftp://h"],
)
def test_an_endpoint_or_mirror_that_is_no_url_is_refused_by_name_and_value(url, tmp_path):
    for name, options in ("HF_ENDPOINT", Options(hub_endpoint=url)), ("MODEL_MIRROR", Options(mirror=url)):
        with pytest.raises(DownloadError, match=f"^{name} is {re.escape(repr(url))}, it must be an http"):
            download(NAME, tmp_path, options)


def test_a_password_in_a_url_is_refused_and_not_repeated(tmp_path):
    for options in Options(hub_endpoint="http://me:pass@h"), Options(mirror="http://me:pass@h"):
        with pytest.raises(DownloadError, match="has a user name or password in it") as caught:
            download(NAME, tmp_path, options)
        assert "pass@" not in str(caught.value)


def test_options_come_from_the_environment():
    environ = {"MODEL_MIRROR": "http://m", "tag": "3.1", "MD5_CHECK": "1", "HF_ENDPOINT": "http://h/"}
    options = Options.from_env(environ, nnodes=2)
    assert (options.mirror, options.tag, options.hub_endpoint) == ("http://m", "3.1", "http://h")
    assert options.policy.rehash and options.nnodes == 2
    assert Options.from_env({}) == Options(tag="3.0.0.b4")
    with pytest.raises(DownloadError, match="MD5_CHECK is 'yes'"):
        Options.from_env({"MD5_CHECK": "yes"})


def test_the_command_line_has_the_short_and_the_long_options():
    short = download_model.parse_args("-m a/b -d models -n 2 -M slave -s draft".split())
    long = download_model.parse_args(
        "--model_name a/b --dir models --nnodes 2 --mode slave --speculate_model_path draft".split()
    )
    assert short == long
    defaults = {"dir": "downloads", "nnodes": 1, "mode": "master", "speculate_model_path": None}
    assert vars(download_model.parse_args([])) == defaults | {"model_name": download_model.DEFAULT_MODEL}


# a mirror of static models


def test_a_static_model_arrives_whole(mirror, tmp_path):
    done = download(NAME, tmp_path, mirror)
    assert done.model_dir == tmp_path / NAME
    assert (done.quant, done.is_static, done.num_fetched) == ("weight_only_int8", True, 3)
    assert files_in(done.model_dir) == STATIC
    assert replace(done, num_fetched=0) == find_download(done.model_dir)


@pytest.mark.parametrize(
    ("nnodes_and_mode", "part"),
    [((1, "master"), "model"), ((1, "slave"), "model"), ((2, "master"), "node1"), ((2, "slave"), "node2")],
)
def test_each_node_gets_its_own_folder(nnodes_and_mode, part, server, mirror, tmp_path):
    nnodes, mode = nnodes_and_mode
    server.add_folder(f"{FOLDER}/node1", {"config.json": b"of node1"})
    server.add_folder(f"{FOLDER}/node2", {"config.json": b"of node2"})
    server.add_folder(f"{FOLDER}/model", {"config.json": b"of model"})
    done = download(NAME, tmp_path, replace(mirror, nnodes=nnodes, mode=mode))
    assert files_in(done.model_dir) == {"config.json": f"of {part}".encode()}


def test_the_draft_model_goes_to_its_own_directory(server, mirror, tmp_path):
    server.add_folder(f"{FOLDER}/mtp", {"config.json": b"of the draft"})
    done = download(NAME, tmp_path, replace(mirror, speculate_dir=str(tmp_path / "draft")))
    assert files_in(done.model_dir) == STATIC
    assert done.speculate_dir == tmp_path / "draft"
    assert files_in(tmp_path / "draft") == {"config.json": b"of the draft"}
    with pytest.raises(DownloadError, match="the model's own directory"):
        download(NAME, tmp_path, replace(mirror, speculate_dir=str(done.model_dir)))


def test_a_second_run_transfers_no_file(server, mirror, tmp_path):
    download(NAME, tmp_path, mirror)
    server.requests.clear()
    assert download(NAME, tmp_path, mirror).num_fetched == 0
    assert server.requests == [("GET", f"/{FOLDER}/model/file_list.txt", None)]


def test_a_connection_cut_in_mid_file_is_resumed_where_it_broke(server, mirror, tmp_path):
    server.faults[weights_url()] = [Fault(cut_after=100_000), Fault(cut_after=50_000)]
    assert files_in(download(NAME, tmp_path, mirror).model_dir) == STATIC
    assert server.ranges_of(weights_url()) == [None, "bytes=100000-", "bytes=150000-"]


def test_a_try_that_gets_further_does_not_count_as_failed(server, mirror, tmp_path):
    server.faults[weights_url()] = [Fault(cut_after=10_000) for _ in range(3 * FAST.num_tries)]
    assert files_in(download(NAME, tmp_path, mirror).model_dir) == STATIC


def test_a_partial_file_of_the_run_before_is_resumed(server, mirror, tmp_path):
    server.faults[weights_url()] = [Fault(cut_after=100_000), *[Fault(status=503)] * (FAST.num_tries - 1)]
    with pytest.raises(DownloadError, match="rank_0/model.pdiparams: HTTP 503"):
        download(NAME, tmp_path, mirror)
    rank_dir = tmp_path / NAME / "rank_0"
    assert not (rank_dir / "model.pdiparams").exists()
    assert (rank_dir / "model.pdiparams.partial").read_bytes() == WEIGHTS[:100_000]
    assert find_download(tmp_path / NAME) is None
    server.requests.clear()
    assert files_in(download(NAME, tmp_path, mirror).model_dir) == STATIC
    assert server.ranges_of(weights_url()) == ["bytes=100000-"]


@pytest.mark.parametrize(
    ("left", "ranges"),
    [
        pytest.param(WEIGHTS, [], id="all of it"),
        pytest.param(b"junk", ["bytes=4-", None], id="of another version"),
        pytest.param(WEIGHTS + b"more", ["bytes=300004-", None], id="too much"),
    ],
)
def test_whatever_partial_file_is_left_the_result_is_right(left, ranges, server, mirror, tmp_path):
    partial = tmp_path / NAME / "rank_0/model.pdiparams.partial"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(left)
    assert files_in(download(NAME, tmp_path, mirror).model_dir) == STATIC
    assert server.ranges_of(weights_url()) == ranges


def test_a_server_that_knows_no_ranges_sends_everything_again(server, mirror, tmp_path):
    server.faults[weights_url()] = [Fault(cut_after=100_000), Fault(knows_ranges=False)]
    assert files_in(download(NAME, tmp_path, mirror).model_dir) == STATIC


def test_a_server_may_send_less_than_the_rest(server, mirror, tmp_path):
    server.faults[weights_url()] = [Fault(cut_after=100_000), Fault(max_range=50_000)]
    assert files_in(download(NAME, tmp_path, mirror).model_dir) == STATIC
    assert server.ranges_of(weights_url()) == [None, "bytes=100000-", "bytes=150000-"]


def test_a_server_that_does_not_tell_lengths_is_fine(server, mirror, tmp_path):
    server.faults[weights_url()] = [Fault(tells_length=False)]
    assert files_in(download(NAME, tmp_path, mirror).model_dir) == STATIC
    assert server.ranges_of(weights_url()) == [None]


def test_a_connection_that_is_reset_or_falls_silent_is_made_again(server, mirror, tmp_path):
    server.faults[weights_url()] = [Fault(cut_after=200_000, resets=True)]
    server.faults[f"/{FOLDER}/model/config.json"] = [Fault(is_silent=True)]
    options = replace(mirror, policy=replace(FAST, timeout_s=0.5))
    assert files_in(download(NAME, tmp_path, options).model_dir) == STATIC


def test_a_busy_server_is_asked_again(server, mirror, tmp_path):
    server.faults[weights_url()] = [Fault(status=503), Fault(status=429)]
    server.faults[f"/{FOLDER}/model/file_list.txt"] = [Fault(status=500)]
    assert files_in(download(NAME, tmp_path, mirror).model_dir) == STATIC
    assert len(server.ranges_of(weights_url())) == 3


def test_a_busy_server_is_given_the_time_it_asks_for(server, mirror, hub, tmp_path, monkeypatch):
    def busy(status, seconds):
        return Fault(status, headers={"Retry-After": str(seconds)})

    waits = []
    monkeypatch.setattr(Stop, "wait", lambda _, seconds: waits.append(seconds))
    server.faults[weights_url()] = [busy(503, 60), busy(429, 7200)]
    download(NAME, tmp_path / "static", mirror)
    server.faults["/api/models/an-org/a-model"] = [busy(429, 50), Fault(status=503)]
    download(NAME, tmp_path / "hub", hub)
    assert waits == [60, FAST.max_wait_s, 50, pytest.approx(2 * FAST.backoff_s)]


def test_a_wrong_md5_is_tried_once_more_and_then_fails_without_a_file(server, mirror, tmp_path):
    server.faults[weights_url()] = [Fault(body=b"wrong")] * 2
    with pytest.raises(DownloadError, match="rank_0/model.pdiparams: md5 is .*, expected"):
        download(NAME, tmp_path, mirror)
    assert list((tmp_path / NAME / "rank_0").glob("*.pdiparams*")) == []
    assert files_in(download(NAME, tmp_path, mirror).model_dir) == STATIC


def test_a_permanent_redirect_is_followed(server, mirror, tmp_path):
    server.moved[f"/{FOLDER}/model/file_list.txt"] = (308, "/list")
    server.contents["/list"] = server.contents[f"/{FOLDER}/model/file_list.txt"]
    assert files_in(download(NAME, tmp_path, mirror).model_dir) == STATIC


def test_a_missing_file_fails_at_once_with_its_name(server, mirror, tmp_path):
    del server.contents[weights_url()]
    with pytest.raises(DownloadError, match="^rank_0/model.pdiparams: HTTP 404"):
        download(NAME, tmp_path, mirror)
    assert len(server.ranges_of(weights_url())) == 1


def test_a_missing_file_list_fails_with_its_url(server, mirror, tmp_path):
    with pytest.raises(DownloadError, match=r"^http://.*/other/model/file_list.txt: HTTP 404"):
        download("an-org/other", tmp_path, mirror)


@pytest.mark.parametrize(
    "path",
    [
        "../evil",
        "/etc/evil",
        "rank_0/../../evil",
        "a//b",
        "./a",
        "a\\..\\b",
        "",
        "download.json",
        "a.partial",
    ],
)
def test_a_path_that_leads_out_of_the_directory_is_refused(path, server, mirror, tmp_path):
    server.add_folder(f"{FOLDER}/model", {path: b"evil", "config.json": b"{}"})
    with pytest.raises(DownloadError, match="refused the"):
        download(NAME, tmp_path / "models", mirror)
    assert files_in(tmp_path) == {}


@pytest.mark.parametrize("link", ["rank_0", "rank_0/model.pdiparams.partial"])
def test_a_symbolic_link_that_leads_out_of_the_directory_is_refused(link, mirror, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    planted = tmp_path / "models" / NAME / link
    planted.parent.mkdir(parents=True)
    planted.symlink_to(outside if link == "rank_0" else outside / "file")
    with pytest.raises(DownloadError, match="symbolic link"):
        download(NAME, tmp_path / "models", mirror)
    assert files_in(outside) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<html>Please log in</html>", "expected `path:md5`, got '<html>"),
        ("config.json:123", "expected `path:md5`"),
        ("\n", "lists no files"),
        (f"a:{'0' * 32}\na:{'1' * 32}", "a is listed with two different md5"),
        (b"\xff\xfe", "is not text"),
    ],
)
def test_a_file_list_that_is_none_is_refused(text, message, server, mirror, tmp_path):
    body = text if isinstance(text, bytes) else text.encode()
    server.contents[f"/{FOLDER}/model/file_list.txt"] = body
    with pytest.raises(DownloadError, match=message):
        download(NAME, tmp_path, mirror)


def test_a_file_list_of_windows_is_read(server, mirror, tmp_path):
    file_list = f"/{FOLDER}/model/file_list.txt"
    lines = server.contents[file_list].replace(b"\n", b"\r\n")
    server.contents[file_list] = b"\xef\xbb\xbf" + lines
    assert files_in(download(NAME, tmp_path, mirror).model_dir) == STATIC


def test_what_a_server_says_becomes_one_plain_line(server, mirror, tmp_path):
    server.moved[weights_url()] = (302, weights_url())
    with pytest.raises(DownloadError, match="^rank_0/model.pdiparams: HTTP 302 .*infinite loop.*Found$"):
        download(NAME, tmp_path, mirror)
    del server.moved[weights_url()]
    server.closed.add(weights_url())
    with pytest.raises(DownloadError, match="^rank_0/model.pdiparams: HTTP 401 Access is restricted$"):
        download(NAME, tmp_path, mirror)


def test_a_changed_file_is_noticed_and_fetched_again(server, mirror, tmp_path):
    model_dir = download(NAME, tmp_path, mirror).model_dir
    (model_dir / "rank_0/model.pdiparams").write_bytes(WEIGHTS[::-1])
    assert download(NAME, tmp_path, mirror).num_fetched == 1
    assert files_in(model_dir) == STATIC


def test_files_without_a_record_are_verified_not_fetched(server, mirror, tmp_path):
    for path, body in STATIC.items():
        (tmp_path / NAME / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / NAME / path).write_bytes(body)
    (tmp_path / NAME / "download.json").write_text("half a rec")
    assert download(NAME, tmp_path, mirror).num_fetched == 0
    assert server.ranges_of(weights_url()) == []


def test_md5_check_reads_again_what_was_verified(mirror, tmp_path):
    model_dir = download(NAME, tmp_path, mirror).model_dir
    weights = model_dir / "rank_0/model.pdiparams"
    stamp = weights.stat()
    weights.write_bytes(WEIGHTS[::-1])  # as a failing disk would: same size, same time
    os.utime(weights, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert download(NAME, tmp_path, mirror).num_fetched == 0
    assert download(NAME, tmp_path, replace(mirror, policy=replace(FAST, rehash=True))).num_fetched == 1
    assert files_in(model_dir) == STATIC


def test_a_directory_of_another_node_or_version_is_left_alone(server, mirror, tmp_path):
    server.add_folder(f"{FOLDER}/node1", STATIC)
    server.add_folder(f"{FOLDER}/node2", {"config.json": b"of node2"})
    model_dir = download(NAME, tmp_path, replace(mirror, nnodes=2)).model_dir
    with pytest.raises(DownloadError, match="holds 3.0.0.b4/.*/node1 of a mirror, not .*/node2"):
        download(NAME, tmp_path, replace(mirror, nnodes=2, mode="slave"))
    assert files_in(model_dir) == STATIC


def test_files_that_are_no_longer_listed_are_removed(server, mirror, tmp_path):
    model_dir = download(NAME, tmp_path, mirror).model_dir
    (model_dir / "notes.txt").write_text("the operator's own")
    server.add_folder(f"{FOLDER}/model", {"config.json": b"newer"})
    download(NAME, tmp_path, mirror)
    assert files_in(model_dir) == {"config.json": b"newer", "notes.txt": b"the operator's own"}


def test_a_complete_copy_is_enough_when_the_server_is_down(server, mirror, tmp_path):
    model_dir = download(NAME, tmp_path, mirror).model_dir
    file_list = f"/{FOLDER}/model/file_list.txt"
    server.faults[file_list] = [Fault(status=503)] * 2
    assert download(NAME, tmp_path, mirror).num_fetched == 0
    (model_dir / "config.json").unlink()
    server.faults[file_list] = [Fault(status=503)] * 3
    with pytest.raises(DownloadError, match="HTTP 503"):
        download(NAME, tmp_path, mirror)


def test_two_downloads_into_one_directory_take_turns(server, mirror, tmp_path):
    (tmp_path / NAME).mkdir(parents=True)
    with (tmp_path / NAME / ".download.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=download, args=(NAME, tmp_path, mirror))
        second.start()
        second.join(0.05)
        assert second.is_alive() and server.requests == []
    second.join()
    assert files_in(tmp_path / NAME) == STATIC


def test_an_error_of_the_disk_is_told_with_the_name_of_the_file(mirror, tmp_path):
    (tmp_path / NAME / "rank_0").mkdir(parents=True)
    (tmp_path / NAME / "rank_0/model.pdiparams.partial").mkdir()
    with pytest.raises(DownloadError, match="^rank_0/model.pdiparams: Is a directory"):
        download(NAME, tmp_path, mirror)


def test_a_directory_that_cannot_be_made_is_a_download_error(mirror, tmp_path):
    (tmp_path / "an-org").write_text("a file")
    with pytest.raises(DownloadError, match="an-org/a-model/weight_only_int8: .*Not a directory"):
        download(NAME, tmp_path, mirror)


def test_a_complete_copy_need_not_be_writable(mirror, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    model_dir = download(NAME, tmp_path, mirror).model_dir
    monkeypatch.setattr("engine.download.copy.file_lock", refuse)
    assert download(NAME, tmp_path, mirror).num_fetched == 0
    with pytest.raises(DownloadError, match="Read-only file system"):
        download(NAME, tmp_path, replace(mirror, policy=replace(FAST, rehash=True)))
    (model_dir / "config.json").unlink()
    with pytest.raises(DownloadError, match="Read-only file system"):
        download(NAME, tmp_path, mirror)


# the hub


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
    assert find_download(done.model_dir).quant == "weight_only_int8"


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
    with pytest.raises(DownloadError, match="config.json: the server sends more than its 23 bytes"):
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
        download("an-org/other", tmp_path, hub)
    assert len(server.requests) == 1


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


def test_a_draft_model_is_not_to_be_had_from_the_hub(server, hub, tmp_path):
    with pytest.raises(DownloadError, match="speculate_model_path is for a mirror"):
        download(NAME, tmp_path, replace(hub, speculate_dir=str(tmp_path)))
    assert server.requests == []


def test_too_little_room_is_told_before_anything_is_fetched(server, hub, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=250_000))
    with pytest.raises(DownloadError, match="1 MB needed, 0 MB are free"):
        download(NAME, tmp_path, hub)
    assert len(server.requests) == 1


def test_a_checkpoint_can_be_refused_by_its_config_before_anything_else_is_fetched(server, hub, tmp_path):
    def refuse(path):
        raise LookupError(path.read_text())

    with pytest.raises(LookupError, match="llama"):
        download(NAME, tmp_path, replace(hub, check_config=refuse))
    assert [path for method, path, _ in server.requests[1:]] == [server.hub_path("an-org/a-model", "config.json")]
    assert download(NAME, tmp_path, replace(hub, check_config=lambda _: None)).num_fetched == len(CHECKPOINT) - 1
    assert files_in(tmp_path / NAME) == CHECKPOINT


def test_a_hub_that_cannot_be_reached_is_an_error_the_first_time_only(hub, tmp_path):
    with ModelServer() as ended:
        pass
    nowhere = replace(hub, hub_endpoint=ended.url)
    with pytest.raises(DownloadError, match=f"an-org/a-model on {ended.url}: .*refused"):
        download(NAME, tmp_path, nowhere)
    download(NAME, tmp_path, hub)
    assert download(NAME, tmp_path, nowhere).num_fetched == 0


# the command


def run_command(*args: str, **settings: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-W", "error", str(ROOT / "download_model.py"), *args]
    return subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=60)


def test_the_command_downloads_from_the_hub(server, hub, tmp_path):
    ran = run_command("-m", NAME, "-d", str(tmp_path / "models"), HF_ENDPOINT=server.url)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert files_in(tmp_path / "models" / NAME) == CHECKPOINT


def test_the_command_downloads_from_a_mirror_chosen_by_the_environment(server, mirror, tmp_path):
    ran = run_command("-m", NAME, "-d", str(tmp_path / "models"), MODEL_MIRROR=mirror.mirror)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert files_in(tmp_path / "models" / NAME) == STATIC


def test_a_failed_command_says_why_in_one_line_and_is_not_zero(server, mirror, tmp_path):
    del server.contents[weights_url()]
    ran = run_command("-m", NAME, "-d", str(tmp_path / "models"), MODEL_MIRROR=mirror.mirror)
    assert ran.returncode == 1
    assert ran.stderr == "download_model.py: rank_0/model.pdiparams: HTTP 404 Not Found\n"


def test_an_interrupted_command_ends_at_once_and_goes_on_the_next_time(server, mirror, tmp_path):
    server.faults[weights_url()] = [Fault(cut_after=100_000), Fault(is_silent=True)]
    command = [sys.executable, str(ROOT / "download_model.py"), "-m", NAME, "-d", str(tmp_path)]
    settings = os.environ | {"MODEL_MIRROR": mirror.mirror}
    with subprocess.Popen(command, env=settings, stderr=subprocess.PIPE, text=True) as running:
        assert server.has_fallen_silent.wait(60)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert said == "download_model.py: interrupted; the same command goes on from here\n"
    assert files_in(download(NAME, tmp_path, mirror).model_dir) == STATIC
    assert server.ranges_of(weights_url()) == [None, "bytes=100000-", "bytes=100000-"]


def test_an_unknown_argument_is_one_line_too():
    ran = run_command("--nnodes", "two")
    assert ran.returncode == 2
    assert ran.stderr == "download_model.py: argument -n/--nnodes: invalid int value: 'two'\n"
