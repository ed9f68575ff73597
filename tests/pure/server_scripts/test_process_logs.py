"""Log files: as many as promised, as long as promised, and what their end says."""

import io
import logging
import os

import pytest

from engine.log import configure, printable
from engine.settings.config import Config
from server_scripts import logs, serve
from server_scripts.report import Reporter
from server_scripts.run_dir import RunDir


def test_a_log_is_rotated_once_it_is_longer_than_the_setting_says(tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "LOGS_EVERY_S", -1)
    maintenance = serve.Maintenance(Config(log_dir=str(tmp_path), log_max_bytes=100), RunDir(tmp_path / "run"))
    path = tmp_path / "server.log"
    for num_bytes, backups in ((100, []), (101, ["x" * 101])):
        path.write_text("x" * num_bytes)
        maintenance()
        assert [backup.read_text() for backup in tmp_path.glob("server.log.*")] == backups


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
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.log", "")]


def test_a_file_starts_anew_under_its_writer(tmp_path):
    path = tmp_path / "a.log"
    with path.open("a") as writer:
        writer.write("x" * 100)
        writer.flush()
        logs.rotate(path, 1, has_writer=True)
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
    logs.rotate(path, 2, has_writer=True)
    assert [(p.name, p.stat().st_size) for p in tmp_path.iterdir()] == [("a.log", 0)]


def test_the_tail_is_the_last_lines_that_say_something(tmp_path):
    path = tmp_path / "a.log"
    assert logs.tail(path, 3) == []
    path.write_bytes(b"a\n" * 50000 + b"b\n\n\xff c\n")
    assert logs.tail(path, 2) == ["b", "\ufffd c"]
    table = "+---+---+\n| a | 1 |\n+---+---+\n"
    path.write_text(f"the reason\n{table}\nthe end\n")
    assert logs.tail(path, 3) == ["the reason", "the end"]


@pytest.fixture
def pipe():
    read_fd, write_fd = os.pipe()
    with os.fdopen(read_fd) as reader, os.fdopen(write_fd, "wb", buffering=0) as writer:
        yield reader, writer


def test_the_console_copies_whole_lines_once_with_their_process(tmp_path, pipe):
    reader, writer = pipe
    path, own = tmp_path / "a.log", tmp_path / "own.log"
    console = logs.LogConsole({"": own, "engine": path}, writer.fileno())
    console.copy()
    path.write_text("one\ntwo")
    own.write_text("our own\n")
    console.copy()
    console.copy()
    path.write_text("two and a half\n")  # longer than what was copied: goes on from there
    path.write_text("new\n")
    logs.rotate(path, 0, has_writer=True)
    console.copy()
    path.write_text("after\n")
    console.copy()
    writer.close()
    assert reader.read().splitlines() == ["our own", "[engine] one", "[engine] after"]


def test_a_blocked_terminal_blocks_no_process_and_nothing_is_lost(tmp_path, pipe):
    reader, writer = pipe
    path = tmp_path / "a.log"
    console = logs.LogConsole({"": path}, writer.fileno())
    console.start()
    lines = "".join(f"line {number}\n" for number in range(200_000))  # more than a pipe holds
    path.write_text(lines)
    console.finish(0.1)
    assert reader.read(len(lines)) == lines


def test_the_last_lines_are_copied_before_the_end(tmp_path, pipe):
    reader, writer = pipe
    path = tmp_path / "a.log"
    console = logs.LogConsole({"": path}, writer.fileno())
    console.start()
    path.write_text("the last words\n")
    console.finish(60)
    assert reader.readline() == "the last words\n"


def test_a_closed_terminal_ends_no_process(tmp_path, pipe):
    reader, writer = pipe
    path = tmp_path / "a.log"
    path.write_text("unread\n")
    reader.close()
    logs.LogConsole({"": path}, writer.fileno()).copy()


def test_names_of_clients_and_files_forge_no_line_and_move_no_terminal(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.root.level)
    configure("INFO", stream)
    logging.getLogger("a").info("loaded %s", "x\n2026 INFO root: y\x1b[31m\r\x85ö")
    assert stream.getvalue().endswith(r" INFO a: loaded x" + "\n    2026 INFO root: y" + r"\x1b[31m\r\x85ö" + "\n")


def test_the_report_of_a_start_moves_no_terminal():
    reader, writer = os.pipe()
    Reporter(writer)("failed: tensor \x1b[31m\nsecond\u2028line")
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as file:
        lines = file.read().splitlines()
    assert [line.lstrip() for line in lines] == ["[   0.0 s] failed: tensor \\x1b[31m", "second\\u2028line"]


def test_joiners_and_wide_spaces_are_printed_as_they_are():
    """Persian and emoji are written with the one, Chinese with the other."""
    text = "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 \U0001f469\u200d\U0001f4bb \u4f60\u3000\u597d 1\u202f000"
    assert printable(text) == text
    assert printable("a\u202eb\u200fc\ufeff") == r"a\u202eb\u200fc\ufeff"  # what turns or hides the text
