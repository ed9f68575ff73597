"""The output in the foreground: whole when it is read, and no reason to wait when it is not."""

import os
import re

import pytest

from server_scripts.console import Console


@pytest.fixture
def pipe():
    read_fd, write_fd = os.pipe()
    with os.fdopen(read_fd) as reader, os.fdopen(write_fd, "wb", buffering=0) as writer:
        yield reader, writer


def test_what_is_read_arrives_whole(pipe):
    reader, writer = pipe
    console = Console(writer.fileno())
    for number in range(100):
        console.write(f"line {number}\n")
    console.finish(60)
    assert [reader.readline() for _ in range(100)] == [f"line {number}\n" for number in range(100)]


def test_what_nobody_reads_is_dropped_in_the_end_and_the_gap_is_told(pipe):
    reader, writer = pipe
    line = "x" * 99 + "\n"
    console = Console(writer.fileno(), max_chars=100_000)
    for _ in range(10_000):  # a megabyte: a pipe holds 64 kB
        console.write(line)
    console.finish(0)
    num_read = num_left_out = 0
    while num_read + num_left_out < 10_000:
        if (read := reader.readline()) == line:
            num_read += 1
        else:
            gap = re.fullmatch(r"\[supervisor\] (\d+) lines are left out here, as nobody was reading\n", read)
            num_left_out += int(gap[1])
    assert num_read + num_left_out == 10_000
    assert num_read >= 1000
    console.write("on it goes\n")
    assert reader.readline() == "on it goes\n"


def test_a_reader_that_has_left_hurts_nobody(pipe):
    reader, writer = pipe
    console = Console(writer.fileno())
    reader.close()
    for _ in range(2):
        console.write("to nobody\n")
        console.finish(60)


def test_a_full_disk_under_our_output_hurts_nobody():
    with open("/dev/full", "wb", buffering=0) as full:
        console = Console(full.fileno())
        for _ in range(2):
            console.write("a line\n")
            console.finish(60)
