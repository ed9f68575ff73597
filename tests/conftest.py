"""What every test shares. A test needs what its folder is named after."""

import signal
from pathlib import Path

import pytest


def pytest_configure():
    # A shell starts background jobs with SIGINT ignored, and children inherit that: tests that send it would wait.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    for item in items:
        folder = Path(item.path).parent.name
        if folder in ("triton", "cuda"):
            item.add_marker(getattr(pytest.mark, folder))
