"""The code blocks of README.md and docs/ are code: Python compiles, JSON parses, shell commands and files exist."""

import ast
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from engine.settings.foreign.table import VARIABLES

ROOT = Path(__file__).resolve().parents[3]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
LANGUAGES = {"", "bash", "python", "json", "ini", "promql", "tree"}
# Programs that are not of this repository, which the documentation tells readers to call.
OTHER_PROGRAMS = {
    "cd",
    "curl",
    "docker",
    "env/bin/python",
    "export",
    "grpcurl",
    "lm_eval",
    "mpirun",
    "pip",
    "python3",
    "source",
}
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page, language):
    """Return the texts of the fenced blocks of one language."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.S | re.M)
    return [text for name, text in fenced if name == language]


def commands(text):
    """Return the words of each command of a shell block, without comments and leading variables."""
    lines = text.replace("\\\n", " ").splitlines()
    for line in lines:
        words = shlex.split(line, comments=True)
        for end in [n for n, word in enumerate(words) if word in ("&&", "|", ";")] + [len(words)]:
            command = [word for word in words[:end] if word not in ("&&", "|", ";")]
            words[:end] = [";"] * end
            while command and re.fullmatch(r"\w+=.*", command[0]):
                command.pop(0)
            if command:
                yield command


@pages
def test_every_block_has_a_known_language(page):
    """The closing fence of a block has no language either, so every second fence is checked."""
    fences = re.findall(r"^```(.*)$", page.read_text(), re.M)
    assert len(fences) % 2 == 0
    assert set(fences[::2]) <= LANGUAGES


@pages
def test_python_blocks_compile(page):
    for text in blocks(page, "python"):
        ast.parse(text)


@pages
def test_packages_of_python_blocks_are_installed_with_the_server_or_by_a_command_of_the_page(page):
    server = re.findall(r"^[\w-]+", (ROOT / "requirements.txt").read_text(), re.M)
    known = {*sys.stdlib_module_names, "engine", "gateway", *(name.replace("-", "_") for name in server)}
    for command in re.findall(r"pip install ([\w -]+)", page.read_text()):
        known |= set(command.split())
    nodes = [node for text in blocks(page, "python") for node in ast.walk(ast.parse(text))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    assert {name.split(".")[0] for name in names} <= known


@pages
def test_json_blocks_parse(page):
    for text in blocks(page, "json"):
        json.loads(text)


@pages
def test_programs_of_shell_blocks_exist(page):
    project = (ROOT / "pyproject.toml").read_text()
    scripts = set(re.findall(r'^"?([\w.]+)"? = "server_scripts\.', project, re.M))
    scripts |= set(re.findall(r'"server_scripts/([\w.]+)"', project))
    assert {"start_server", "start_servers.sh"} <= scripts
    for text in blocks(page, "bash"):
        for program, *arguments in commands(text):
            name = program.removeprefix(".venv/bin/")
            if name == "python" and arguments[0].endswith(".py"):
                assert (ROOT / arguments[0]).exists(), arguments
            else:
                assert name in scripts | OTHER_PROGRAMS | {"python", "make"}, f"{program} of {page.name}"


@pages
def test_variables_before_start_server_are_settings(page):
    known = set(re.findall(r"\w+", (ROOT / "docs/settings.md").read_text())) | VARIABLES.keys()
    for text in blocks(page, "bash"):
        for variables in re.findall(r"^((?:[A-Z_]+=\S+ )+)start_server", text, re.M):
            assert set(re.findall(r"([A-Z_]+)=", variables)) <= known


def test_the_site_has_every_page_in_its_menu():
    menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    expected = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    expected |= {page.name for page in ROOT.glob("*.md")} - {"README.md"} | {"index.md"}
    assert set(re.findall(r": (\S+\.md)$", menu, re.M)) == expected
