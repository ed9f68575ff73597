"""Tests of the language of the whole tree: names are the field's terms, docstrings are sentences."""

import ast
import io
import re
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("benchmarks", "demo_model", "engine", "gateway", "model_repository", "server_scripts", "tests")
PATTERNS = ("Makefile", "*.md", "*.h", "*.cc", "*.js", "run", "Dockerfile.*")
# Texts of the demo model's training data use words as English does, and this file names what it looks for.
EXEMPT = {Path(__file__), *(ROOT / "demo_model").glob("*.py")}

# First words that make a fragment of a docstring instead of a sentence.
FRAGMENTS = {
    *("of", "for", "from", "with", "without", "by", "to", "in", "on", "at", "into", "under", "beyond", "between"),
    *("over", "past", "within", "around", "beside", "besides", "instead", "than", "as", "like", "until", "before"),
    *("after", "when", "where", "while", "if", "because", "also", "and", "or", "but", "once", "up"),
    *("what", "who", "whom", "whose", "whoever", "whether", "which", "how", "why", "that", "those", "these"),
    *("empty", "none", "true", "false", "same", "idempotent", "half", "else", "not", "no", "so"),
}
# First words of a docstring of a function that has no verb in the imperative.
NOT_IMPERATIVE = {
    *("a", "an", "the", "this", "it", "its", "they", "all", "any", "each", "every", "one", "some", "several"),
}
# Words of the terminology table's left column, which no definition may have as a part of its name ...
RETIRED_WORDS = {"told", "untold", "gained", "nobody", "nobodys", "company", "holdings", "roster"}
# ... whole names that are retired ...
RETIRED_NAMES = {
    *("Waiting", "Reading", "OfPrompt", "is_told", "most_read", "nobodys_block", "one_row", "few_rows", "packets"),
    *("known_scores", "team", "meeting", "form", "forms", "intake", "standing"),
}
# ... (a file with neither needs no closer look) ...
SUSPECT = re.compile(rf"\b({'|'.join(RETIRED_NAMES)})\b|(?i:{'|'.join(RETIRED_WORDS)})")
# ... modules ...
RETIRED_MODULES = {
    *("swap", "parts", "questions", "again", "ranking", "received", "intake", "standing", "company", "forms"),
    *("roster", "packets", "team", "segment", "meeting", "mailbox", "one_row", "few_rows"),
}
# ... and words of any text.
RETIRED_TEXT = re.compile(
    r"\b(nobody|whoever|untold|Holdings|Roster|OfPrompt|is_told|most_read|nobodys_block|one_row|few_rows|lowbit_few)\b"
    r"|\b(known scores|answers? of a given form|changes no bit|(is|are|was|were|be) told)\b|cuda/packets|cpu/team",
    re.I,
)


STATEMENTS = (ast.stmt, ast.ExceptHandler, ast.match_case)


def modules():
    return [ROOT / "download_model.py", *(each for name in FOLDERS for each in sorted((ROOT / name).rglob("*.py")))]


def other_texts():
    """Return the files that are not Python: documentation, C++, scripts of the page, the Makefile."""
    folders = [ROOT / name for name in (*FOLDERS, "docs", "dockerfiles", ".ci")]
    found = [each for folder in folders for pattern in PATTERNS for each in sorted(folder.rglob(pattern))]
    return [*found, *sorted(ROOT.glob("*.md")), ROOT / "Makefile"]


@cache
def python_texts():
    """Return the text of each module."""
    return {path: path.read_text() for path in modules()}


def suspects(pattern):
    """Return the modules and texts in which the pattern occurs, so that only these have to be parsed."""
    return {path: text for path, text in python_texts().items() if path not in EXEMPT and pattern.search(text)}


def place(path, line):
    return f"{path.relative_to(ROOT)}:{line}"


def definitions(tree):
    """Return (name, line) of all that the module defines: functions, classes, parameters, variables, attributes."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.append((node.name, node.lineno))
        elif isinstance(node, ast.arg):
            found.append((node.arg, node.lineno))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.append((node.id, node.lineno))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.append((node.attr, node.lineno))
    return found


def is_retired(name):
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")
    return name in RETIRED_NAMES or not RETIRED_WORDS.isdisjoint(words)


def problem_of(docstring, is_function):
    """Return what is wrong with a docstring, or None."""
    first = re.match(r"[A-Za-z']+", docstring)
    word = first[0].lower() if first else ""
    if word in FRAGMENTS:
        return f"starts with {first[0]!r}, which makes a fragment of it"
    if is_function and (word in NOT_IMPERATIVE or re.search(r"(?<!s)s$", word)):
        return f"starts with {first[0]!r}, which is no verb in the imperative"
    if not docstring.rstrip().endswith((".", ":")) and "\n" not in docstring.strip():
        return "does not end with a period"
    return None


def documented(tree):
    """Yield (line, whether it must be in the imperative, docstring)."""
    statements = [tree]
    while statements:
        node = statements.pop()
        # Expressions have no docstrings, and are most of a tree.
        statements += [each for each in ast.iter_child_nodes(node) if isinstance(each, STATEMENTS)]
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if docstring := ast.get_docstring(node):
                is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
                # The name of a test is a sentence, to which its docstring adds another one.
                yield getattr(node, "lineno", 1), is_function and not node.name.startswith("test_"), docstring


@pytest.mark.slow
def test_docstrings_are_sentences():
    found = [(path, *each) for path, text in python_texts().items() for each in documented(ast.parse(text))]
    problems = {place(path, line): problem_of(text, is_function) for path, line, is_function, text in found}
    assert {where: problem for where, problem in problems.items() if problem} == {}


@pytest.mark.slow
def test_definitions_have_no_retired_names():
    found = [(path, *each) for path, text in suspects(SUSPECT).items() for each in definitions(ast.parse(text))]
    assert {(place(path, line), name) for path, name, line in found if is_retired(name)} == set()
    assert [path for path in modules() if path.stem in RETIRED_MODULES and path not in EXEMPT] == []


@pytest.mark.slow
def test_comments_and_strings_have_no_retired_words():
    found = {}
    for path, text in suspects(RETIRED_TEXT).items():
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING) and RETIRED_TEXT.search(token.string):
                found[place(path, token.start[0])] = token.string
    assert found == {}


def test_other_files_have_no_retired_words():
    lines = [(path, each) for path in other_texts() for each in enumerate(path.read_text().splitlines(), 1)]
    assert {place(path, number): line for path, (number, line) in lines if RETIRED_TEXT.search(line)} == {}


def test_class_names_are_unique():
    others = {ROOT / name for name in ("tests", "benchmarks", "demo_model")}
    product = [text for path, text in python_texts().items() if others.isdisjoint(path.parents)]
    names = Counter(name for text in product for name in re.findall(r"^ *class (\w+)[(:]", text, re.M))
    assert {name for name, count in names.items() if count > 1} == set()


@pytest.mark.parametrize(
    ("docstring", "is_function"),
    [
        ("Of every row the tokens up to the first mismatch.", True),
        ("Whether the model answers.", True),
        ("The mirror's folder for this node.", True),
        ("Returns the longest prefix.", True),
        ("What is posted that is no request.", False),
        ("Return the longest prefix", True),
    ],
)
def test_the_check_finds_fragments(docstring, is_function):
    assert problem_of(docstring, is_function)


@pytest.mark.parametrize(
    ("docstring", "is_function"),
    [
        ("Return the longest cached prefix of `token_ids`.", True),
        ("Pass the request on.", True),
        ("KV cache manager of one engine. It allocates blocks to requests.", False),
        ("Free-list allocator: it handles block ids only.\n\nIt knows no tensors.", False),
    ],
)
def test_the_check_accepts_sentences(docstring, is_function):
    assert problem_of(docstring, is_function) is None


@pytest.mark.parametrize("name", ["is_told", "num_gained", "OfPrompt", "nobodys_block", "Company"])
def test_the_check_finds_retired_names(name):
    assert is_retired(name)
