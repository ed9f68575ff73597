"""docs/adding.md keeps its word: a family is one file, one line, one golden checkpoint."""

import inspect
from pathlib import Path

import pytest

from engine.models.families import FAMILIES
from tests import checkpoints

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_is_one_file_of_at_most_60_lines(model_type):
    path = Path(inspect.getfile(FAMILIES[model_type]))
    assert path == ROOT / "engine/models" / f"{model_type}.py"
    assert len(path.read_text().splitlines()) <= 60


def test_every_file_that_describes_a_family_is_in_the_registry():
    describing = [path.stem for path in (ROOT / "engine/models").glob("*.py") if "(DecoderConfig):" in path.read_text()]
    assert sorted(describing) == sorted(FAMILIES)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_is_compared_with_transformers(model_type):
    golden = [name for name, keys in checkpoints.FAMILIES.items() if keys["model_type"] == model_type]
    assert golden
    assert [name for name in golden if not (ROOT / "tests/golden" / f"{name}.npz").exists()] == []


def test_every_path_that_the_page_names_exists():
    named = [word for word in (ROOT / "docs/adding.md").read_text().split("`") if word.endswith(".py") and "/" in word]
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []
