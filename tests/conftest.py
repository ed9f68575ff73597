"""What every test shares. A test needs what its folder is named after."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        folder = Path(item.path).parent.name
        if folder in ("triton", "cuda"):
            item.add_marker(getattr(pytest.mark, folder))
