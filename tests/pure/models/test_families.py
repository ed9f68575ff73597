"""docs/adding.md keeps its word: a family is one file, one line, one golden checkpoint."""

import inspect
from pathlib import Path

import pytest

from engine.models.families import FAMILIES
from tests import checkpoints, family_checkpoints

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_is_one_file_of_at_most_60_lines(model_type):
    path = Path(inspect.getfile(FAMILIES[model_type]))
    assert path.parent == ROOT / "engine/models"
    assert len(path.read_text().splitlines()) <= 60


def test_every_file_that_describes_a_family_is_in_the_registry():
    paths = [path for path in (ROOT / "engine/models").glob("*.py") if path.name != "config.py"]
    describing = [path for path in paths if "    def read(cls, keys: Mapping[str, Any]) ->" in path.read_text()]
    assert set(describing) <= {Path(inspect.getfile(family)) for family in FAMILIES.values()}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_is_compared_with_transformers(model_type):
    golden = [name for name, keys in checkpoints.FAMILIES.items() if keys["model_type"] == model_type]
    paths = [ROOT / "tests/golden" / f"{name}.npz" for name in golden]
    golden = [name for name, keys in family_checkpoints.ALL.items() if keys.get("model_type", name) == model_type]
    paths += [ROOT / "tests/golden/families" / f"{name}.npz" for name in golden]
    assert paths
    assert [path for path in paths if not path.exists()] == []


def test_every_path_that_the_page_names_exists():
    named = [word for word in (ROOT / "docs/adding.md").read_text().split("`") if word.endswith(".py") and "/" in word]
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []
