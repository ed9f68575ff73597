"""Fixtures of the tests without Triton."""

from pathlib import Path

import pytest

from engine.ops.cpu import group
from engine.text.tokenizer import Tokenizer
from tests.byte_tokenizer import write_tokenizer
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """Return a tokenizer of bytes and a few pairs of letters."""
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return Tokenizer.load(directory)


@pytest.fixture(autouse=True)
def group_ends_with_its_test():
    """End the group of ranks of a test that fails before it closes its executor; the next test could join none."""
    yield
    group.leave()


@pytest.fixture
def short_waits(monkeypatch):
    """Let the engine's server and its client look for messages often."""
    monkeypatch.setattr("engine.link.server.IDLE_WAIT_MS", 5)
    monkeypatch.setattr("engine.link.client.PING_INTERVAL_S", 0.01)


@pytest.fixture
def a_checkpoint(tmp_path) -> Path:
    """Return a checkpoint that a test may damage."""
    return make_checkpoint(tmp_path / "checkpoint", "qwen2", seed=0)


@pytest.fixture
def no_paddle(monkeypatch) -> list[str]:
    """Replace the slow half of the export. Return the directories that it was asked to fill."""
    saved = []

    def save_graph(directory, network, graph, checkpoint, progress):
        (directory / graph.program).touch()
        (directory / graph.parameters).touch()
        saved.append(directory.parent.name)

    monkeypatch.setattr("engine.exporting.save.save_graph", save_graph)
    return saved
