"""A static model from a mirror: what is asked for, what arrives, and what happens when the mirror misbehaves."""

from dataclasses import replace

import pytest

from download_model import DownloadError, download
from engine.download import transfer
from engine.download.transfer import Stop
from tests.pure.download.models import FAST, FOLDER, NAME, STATIC, WEIGHTS, files_in, weights_url
from tests.pure.model_server import Fault


def test_a_static_model_arrives_whole(mirror, tmp_path):
    done = download(NAME, tmp_path, mirror)
    assert done.model_dir == tmp_path / NAME
    assert (done.quant, done.is_static, done.num_fetched) == ("weight_only_int8", True, 3)
    assert files_in(done.model_dir) == STATIC


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
    options = replace(mirror, policy=replace(FAST, timeout_s=0.5, num_tries=10))  # a busy machine is silent, too
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


def test_of_a_file_list_without_end_no_more_is_read_than_a_list_can_be(server, mirror, tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "MAX_TEXT_BYTES", 1000)
    server.contents[f"/{FOLDER}/model/file_list.txt"] = bytes(1001)
    with pytest.raises(DownloadError, match="file_list.txt: is longer than 1000 bytes"):
        download(NAME, tmp_path, mirror)


def test_a_file_list_that_was_cut_short_is_asked_for_again(server, mirror, tmp_path):
    server.faults[f"/{FOLDER}/model/file_list.txt"] = [Fault(cut_after=45)]  # the first line, a valid list
    assert files_in(download(NAME, tmp_path, mirror).model_dir) == STATIC


def test_a_missing_file_list_fails_with_its_url(server, mirror, tmp_path):
    with pytest.raises(DownloadError, match=r"^http://.*/other/model/file_list.txt: HTTP 404"):
        download("an-org/other", tmp_path, mirror)


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
def test_a_malformed_file_list_is_refused(text, message, server, mirror, tmp_path):
    body = text if isinstance(text, bytes) else text.encode()
    server.contents[f"/{FOLDER}/model/file_list.txt"] = body
    with pytest.raises(DownloadError, match=message):
        download(NAME, tmp_path, mirror)


def test_a_file_list_of_windows_is_read(server, mirror, tmp_path):
    file_list = f"/{FOLDER}/model/file_list.txt"
    lines = server.contents[file_list].replace(b"\n", b"\r\n")
    server.contents[file_list] = b"\xef\xbb\xbf" + lines
    assert files_in(download(NAME, tmp_path, mirror).model_dir) == STATIC


def test_the_message_of_a_server_becomes_one_plain_line(server, mirror, tmp_path):
    server.moved[weights_url()] = (302, weights_url())
    with pytest.raises(DownloadError, match="^rank_0/model.pdiparams: HTTP 302 .*infinite loop.*Found$"):
        download(NAME, tmp_path, mirror)
    del server.moved[weights_url()]
    server.closed.add(weights_url())
    with pytest.raises(DownloadError, match="^rank_0/model.pdiparams: HTTP 401 Access is restricted$"):
        download(NAME, tmp_path, mirror)
