"""The copy on disk: what is kept, verified, fetched again and removed, and where nothing may be written."""

import errno
import fcntl
import os
import threading
from dataclasses import replace

import pytest

from download_model import DownloadError, download
from tests.pure.download.models import FAST, FOLDER, NAME, STATIC, WEIGHTS, files_in, weights_url
from tests.pure.model_server import Fault


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


@pytest.mark.parametrize("note", [".download.lock", "download.json.partial"])
def test_the_downloads_own_notes_are_not_written_through_a_symbolic_link(note, mirror, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("do not touch")
    planted = tmp_path / "models" / NAME / note
    planted.parent.mkdir(parents=True)
    planted.symlink_to(precious)
    with pytest.raises(DownloadError, match=f"is a symbolic link, which is not followed: '.*{note}'"):
        download(NAME, tmp_path / "models", mirror)
    assert precious.read_text() == "do not touch"


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


def test_a_disk_error_is_reported_with_the_name_of_the_file(mirror, tmp_path):
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
