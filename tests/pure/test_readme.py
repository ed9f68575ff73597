"""The README is true: what it lists exists, what exists and matters is listed."""

import json
import re
import subprocess
from pathlib import Path

from engine import wire
from engine.settings import config
from engine.settings import unused as unused_settings

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_every_path_in_the_tree_exists():
    tree = re.search(r"```tree\n(.*?)```", README, re.S)[1]
    missing, folders = [], []
    for line in tree.splitlines():
        depth, name = len(line) - len(line.lstrip()), line.split()[0]
        folders[depth // 2 :] = [name]
        if not (ROOT / "/".join(folders)).exists():
            missing.append("/".join(folders))
    assert missing == []


def test_every_tracked_top_level_entry_is_in_the_tree():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    entries = {path.split("/")[0] for path in tracked if not path.startswith(".")}
    tree = re.search(r"```tree\n(.*?)```", README, re.S)[1]
    assert {entry for entry in entries if f"\n{entry}" not in f"\n{tree}"} == set()


def test_the_table_of_settings_is_the_codes():
    assert config.markdown_table() in README, "python -m engine.settings.config prints the table"


def test_every_request_field_is_in_the_table_of_fields():
    names = {name for field, (aliases, _) in wire.FIELDS.items() for name in (field, *aliases)}
    assert {name for name in names if f"`{name}`" not in README} == set()


def test_every_error_type_is_in_the_table_of_errors():
    from engine.errors import KINDS

    assert {kind for kind in KINDS if f"`{kind}`" not in README} <= {"internal", "cancelled"}


def test_the_settings_without_effect_are_not_settings():
    envs = {f.metadata["setting"].env for f in config.fields(config.Config)}
    assert envs.isdisjoint(unused_settings.WITHOUT_EFFECT)


def test_json_examples_of_the_readme_are_valid_requests():
    bodies = re.findall(r"-d '(\{.*?\})'", README)
    assert bodies
    for body in bodies:
        wire.parse_request({"req_id": "x"} | json.loads(body))
