"""Log files: as many as promised, as long as promised, and what their end says."""

import io

from server_scripts import logs


def test_rotation_keeps_the_promised_number_of_files(tmp_path):
    path = tmp_path / "a.log"
    for number in range(5):
        path.write_text(str(number))
        logs.rotate(path, 2)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"a.log.1": "4", "a.log.2": "3"}


def test_rotation_without_backups_starts_anew(tmp_path):
    path = tmp_path / "a.log"
    path.write_text("old")
    logs.rotate(path, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_has_grown_too_long_starts_anew_under_its_writer(tmp_path):
    path = tmp_path / "a.log"
    with path.open("a") as writer:
        writer.write("x" * 100)
        writer.flush()
        logs.bound(path, 100, 1)
        assert path.stat().st_size == 100
        logs.bound(path, 99, 1)
        writer.write("more")
        writer.flush()
    assert path.read_text() == "more"
    assert (tmp_path / "a.log.1").read_text() == "x" * 100


def test_a_file_that_cannot_be_copied_starts_anew_all_the_same(tmp_path, monkeypatch):
    def disk_is_full(*_):
        raise OSError(28, "No space left on device")

    path = tmp_path / "a.log"
    path.write_text("x" * 100)
    monkeypatch.setattr("shutil.copyfile", disk_is_full)
    logs.bound(path, 10, 2)
    assert [(p.name, p.stat().st_size) for p in tmp_path.iterdir()] == [("a.log", 0)]


def test_the_tail_is_the_last_lines_that_say_something(tmp_path):
    path = tmp_path / "a.log"
    assert logs.tail(path, 3) == []
    path.write_bytes(b"a\n" * 50000 + b"b\n\n\xff c\n")
    assert logs.tail(path, 2) == ["b", "\ufffd c"]


def test_a_follower_copies_whole_lines_once_with_their_process(tmp_path):
    path, out = tmp_path / "a.log", io.StringIO()
    follower = logs.Follower({"engine": path}, out)
    follower.copy()
    path.write_text("one\ntwo")
    follower.copy()
    follower.copy()
    assert out.getvalue() == "[engine] one\n"
    path.write_text("two and a half\n")  # longer than what was copied: goes on from there
    path.write_text("new\n")
    logs.bound(path, 0, 0)
    follower.copy()
    path.write_text("after\n")
    follower.copy()
    assert out.getvalue().splitlines() == ["[engine] one", "[engine] after"]
