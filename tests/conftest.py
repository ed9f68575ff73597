"""What every test shares. A test needs what its folder is named after."""

import gc
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.exporting.export import ExportOptions, export
from tests import family_checkpoints
from tests.checkpoints import FAMILIES, make_checkpoint


def pytest_configure():
    # A shell starts background jobs with SIGINT ignored, and children inherit that: tests that send it would wait.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Under nohup SIGHUP is ignored, and children inherit that as well. A handler is reset to the default by exec.
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    gc.set_threshold(
        50_000, 20
    )  # libraries and thousands of tests are no garbage, but are looked at whenever it is sought


def pytest_collection_modifyitems(items):
    for item in items:
        folder = Path(item.path).parent.name
        if folder in ("triton", "cuda"):
            item.add_marker(getattr(pytest.mark, folder))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[[str], Path]:
    """The checkpoint of a family, as tests/golden knows it. Do not write into it."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def checkpoint_of(family: str) -> Path:
        directory = folder / family
        make = make_checkpoint if family in FAMILIES else family_checkpoints.make_checkpoint
        return directory if directory.exists() else make(directory, family)

    return checkpoint_of


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
