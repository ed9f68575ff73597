"""Fixtures of all tests. Each test needs what the name of its folder says."""

import gc
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from engine.exporting.export import ExportOptions, export
from engine.file_lock import file_lock
from tests import family_checkpoints
from tests.checkpoints import FAMILIES, make_checkpoint


def pytest_configure():
    # A shell starts background jobs with SIGINT ignored, and children inherit that: tests that send it would wait.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Under nohup SIGHUP is ignored, and children inherit that as well. A handler is reset to the default by exec.
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    # Libraries and thousands of tests are no garbage, but every search for garbage looks at them.
    gc.set_threshold(50_000, 20)


def pytest_collection_finish():
    gc.freeze()  # what has been collected lives until the end: each search through it would take half a second


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(items):
    """Mark the parameters that `sampled` leaves out as thorough. Quick tests come first, then the longest, so that no
    worker has one of these left when the others are done.
    """
    parameters = Counter()  # of each test function that were seen
    for item in items:
        folder = Path(item.path).parent.name
        if folder in ("engines", "triton", "cuda"):
            item.add_marker(getattr(pytest.mark, folder))
        if sampled := item.get_closest_marker("sampled"):
            if parameters[item.function] % sampled.args[0]:
                item.add_marker(pytest.mark.thorough)
            parameters[item.function] += 1
    items.sort(key=lambda item: 1 if "engines" in item.keywords else 2 if "slow" in item.keywords else 0)


@pytest.fixture(scope="session")
def once(tmp_path_factory, pytestconfig) -> Callable[[str, Callable[[Path], object]], Path]:
    """Return a function that makes a folder of a name once, for all workers of a test run."""
    base = tmp_path_factory.getbasetemp()
    # A test that runs pytest passes the variables of its worker on, so they do not say whether this is one.
    folder = (base.parent if hasattr(pytestconfig, "workerinput") else base) / "shared"

    def path(name: str, make: Callable[[Path], object]) -> Path:
        directory, is_made = folder / name, folder / f"{name}.made"
        if not is_made.exists():
            directory.parent.mkdir(parents=True, exist_ok=True)
            with file_lock(folder / f"{name}.lock", lambda: None):
                if not is_made.exists():
                    make(directory)
                    is_made.touch()
        return directory

    return path


@pytest.fixture(scope="session")
def checkpoint(once) -> Callable[[str], Path]:
    """Return a function that makes the checkpoint of a family, as in tests/golden. It must not be changed."""

    def checkpoint_of(family: str) -> Path:
        make = make_checkpoint if family in FAMILIES else family_checkpoints.make_checkpoint
        return once(f"checkpoints/{family}", lambda directory: make(directory, family))

    return checkpoint_of


@pytest.fixture(scope="session")
def exported(once, checkpoint) -> Callable[..., Path]:
    """Return a function that makes the exported model of a family, with the given options. It must not be changed."""

    def exported_as(family: str, **options) -> Path:
        make = partial(export, checkpoint(family), options=ExportOptions(**options))
        name = "-".join([family, *(f"{name}_{value}" for name, value in sorted(options.items()))])
        return once(f"exported/{name}", lambda directory: make(out_dir=directory))

    return exported_as
