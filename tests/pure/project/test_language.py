"""Names in finished packages are the field's terms, and their docstrings are sentences that newcomers can read."""

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Packages and modules whose language is finished. Add a package here when its last file is done.
FINISHED = (
    *("gateway", "server_scripts"),
    *("model_repository", "download_model.py"),
    *("engine/core", "engine/models", "engine/serving", "engine/wire"),
    *("engine/text", "engine/link", "engine/settings", "engine/grammars", "engine/download", "engine/exporting"),
    *(
        f"engine/{name}.py"
        for name in ("__init__", "address", "dtypes", "errors", "file_lock", "garbage", "llm", "log")
    ),
    *(f"engine/{name}.py" for name in ("paddle_files", "process", "protobuf", "sampling_parameters", "tracing")),
)

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
    *("known_scores", "team", "meeting"),
}
# ... and modules.
RETIRED_MODULES = {
    *("swap", "parts", "facts", "questions", "again", "ranking", "received", "intake", "standing", "company", "forms"),
    *("roster", "packets", "team", "meeting"),
}


def modules():
    paths = [ROOT / name for name in FINISHED]
    return [each for path in paths for each in ([path] if path.is_file() else sorted(path.rglob("*.py")))]


each_module = pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))


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
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if docstring := ast.get_docstring(node):
                yield getattr(node, "lineno", 1), isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)), docstring


@each_module
def test_docstrings_are_sentences(path):
    found = documented(ast.parse(path.read_text()))
    problems = {line: problem for line, is_function, text in found if (problem := problem_of(text, is_function))}
    assert problems == {}


@each_module
def test_definitions_have_no_retired_names(path):
    assert {(name, line) for name, line in definitions(ast.parse(path.read_text())) if is_retired(name)} == set()
    assert path.stem not in RETIRED_MODULES


@each_module
def test_comments_and_strings_have_no_retired_words(path):
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    texts = [token for token in tokens if token.type in (tokenize.COMMENT, tokenize.STRING)]
    assert {token.start[0]: token.string for token in texts if re.search(r"\bnobody", token.string, re.I)} == {}


def test_class_names_are_unique():
    trees = [ast.parse(path.read_text()) for path in modules()]
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
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
