"""Exported models that tests share: made at most once a test run."""

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.exporting.export import ExportOptions, export
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[[str], Path]:
    """The checkpoint of a family, as tests/golden knows it. Do not write into it."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def make(family: str) -> Path:
        directory = folder / family
        return directory if directory.exists() else make_checkpoint(directory, family)

    return make


@pytest.fixture(scope="session")
def exported(tmp_path_factory, checkpoint) -> Callable[..., Path]:
    """The exported model of a family, with these options of the export."""
    folder = tmp_path_factory.mktemp("exported")

    def make(family: str, **options) -> Path:
        directory = folder / "-".join([family, *map(str, options.values())])
        if not directory.exists():
            export(checkpoint(family), directory, ExportOptions(**options))
        return directory

    return make


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
