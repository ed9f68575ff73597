"""What tests of the export share."""

from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint


@pytest.fixture
def a_checkpoint(tmp_path) -> Path:
    """A checkpoint that a test may damage."""
    return make_checkpoint(tmp_path / "checkpoint", "qwen2", seed=0)


@pytest.fixture
def no_paddle(monkeypatch) -> list[str]:
    """Replaces the slow half of the export. Collects the directories it was asked to fill."""
    saved = []

    def save_rank(directory, network, graph, checkpoint, progress):
        directory.mkdir()
        (directory / graph.program).touch()
        (directory / graph.parameters).touch()
        saved.append(directory.parent.name)

    monkeypatch.setattr("engine.exporting.save.save_rank", save_rank)
    return saved
