"""The README and the pages under docs/ are true: what they list exists, what exists and matters is listed."""

import ast
import importlib.util
import inspect
import json
import re
import subprocess
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from engine import wire
from engine.core.draft_counts import DraftCounts
from engine.errors import RequestError
from engine.ops.catalogue import EXPORTED, OPS, STATE_OPS, VISION_OPS, documentation
from engine.ops.catalogue_latent import LATENT_OPS
from engine.serving import metrics
from engine.serving.latency import LatencyStats
from engine.serving.rate_limits import RateLimiter
from engine.settings import config
from engine.settings.foreign.page import page as migrating_page
from engine.settings.foreign.table import WITHOUT_EFFECT
from engine.settings.table import markdown_table
from engine.wire import Owner, checks
from gateway import ignored_fields
from gateway.app import make_app
from gateway.health import make_health_app
from gateway.openai.request import FORWARDED_FIELDS, PROMPT_OUTPUT_FIELDS
from gateway.openai.unsupported_fields import REFUSED
from gateway.replicas import metrics as replica_metrics
from server_scripts.processes import LOG_NAMES

ROOT = Path(__file__).resolve().parents[3]
README, *DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LAB, OF_ROOT = sorted((ROOT / "docs/lab").glob("*.md")), [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
CODE = ("engine", "gateway", "server_scripts", "model_repository", "download_model.py")
# Not looked for: what docs/migrating.md names, and pip, as setuptools would replace distutils in this process then.
OTHERS = {"fastdeploy", "sglang", "vllm", "pip"}
pages = pytest.mark.parametrize("page", [README, *DOCS, *LAB, *OF_ROOT], ids=lambda page: page.name)


def text_of(name):
    return (ROOT / name).read_text()


def table(name, first):
    """Return the rows, as lists of cells, of the only table of the page whose head begins with `first`."""
    [rows] = re.findall(rf"^\| {re.escape(first)} \|.*\n\|[ |-]+\n((?:\|.*\n)+)", text_of(name), re.M)
    return [[cell.strip() for cell in row[1:-1].split("|")] for row in rows.splitlines()]


def code_words(text):
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))


# --- the README -----------------------------------------------------------------------------------------------------


def tree():
    return re.search(r"```tree\n(.*?)```", text_of("README.md"), re.S)[1]


def described_paths():
    """Yield each path of the tree with its description."""
    folders = []
    for line in tree().splitlines():
        name, _, description = line.strip().partition(" ")
        folders[(len(line) - len(line.lstrip())) // 2 :] = [name]
        yield ROOT / "/".join(folders), description


def test_every_path_in_the_tree_exists():
    missing = []
    for path, description in described_paths():
        named = re.findall(r"[\w./]+(?:/|\.py|\.pbtxt)(?![\w/])", description) if path.is_dir() else []
        missing += [each for each in (path, *(path / name for name in named)) if not each.exists()]
    assert missing == []


def test_every_package_of_the_engine_and_of_its_executors_is_in_the_tree():
    paths = {path.name + "/" for path, _ in described_paths()} | set(re.findall(r"\w+/", tree()))
    for folder in ("engine", "engine/executors"):
        packages = {path.parent.name + "/" for path in (ROOT / folder).glob("*/__init__.py")}
        assert packages <= paths


def test_every_tracked_top_level_entry_is_in_the_tree():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    entries = {path.split("/")[0] for path in tracked if not path.startswith(".")}
    assert {entry for entry in entries if f"\n{entry}" not in f"\n{tree()}"} == set()


def test_the_readme_is_a_front_door():
    """A newcomer can read it to the end and needs to know no other server."""
    readme = text_of("README.md")
    assert len(readme.splitlines()) < 250
    assert re.findall(r"predecessor|PaddleNLP|FastDeploy|\bFD_", readme) == []


# --- every page -----------------------------------------------------------------------------------------------------


def anchors(page):
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}


@pages
def test_every_link_leads_somewhere(page):
    broken = []
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        found = (page.parent / path) if path else page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            broken.append(target)
    assert broken == []


def test_the_readme_links_every_page():
    assert {page.name for page in DOCS if f"(docs/{page.name})" not in text_of("README.md")} == set()


@pages
def test_every_path_that_is_named_exists(page):
    """Paths of this repository are files with a known ending, or anything in one of its folders."""
    tops = "engine|gateway|server_scripts|tests|benchmarks|docs|dockerfiles|demo_model|model_repository"
    named = re.compile(rf"(?:{tops})/[\w./-]+|[\w/]+\.py")
    paths = {word for word in code_words(page.read_text()) if named.fullmatch(word)}
    assert {path for path in paths if not (ROOT / path).exists()} == set()


@pages
def test_every_command_that_is_named_exists(page):
    text = page.read_text()
    modules = re.findall(r"python -m ([\w.]+)", text)
    ours = [name for name in modules if name.partition(".")[0] not in OTHERS]
    assert [name for name in ours if importlib.util.find_spec(name) is None] == []
    targets = re.findall(r"^([a-z-]+):", text_of("Makefile"), re.M)
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.M)) <= set(targets)


@pages
def test_the_json_of_curl_examples_is_a_valid_native_request(page):
    for body in re.findall(r"-d '(\{.*?\})'", page.read_text()):
        wire.parse_request({"req_id": "x"} | json.loads(body))


def test_every_module_that_a_page_or_a_help_text_names_is_a_command():
    folders = ("engine", "gateway", "server_scripts", "benchmarks")
    texts = [page.read_text() for page in (README, *DOCS)] + [
        path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py")
    ]
    named = set(re.findall(rf"python -m ((?:{'|'.join(folders)})[\w.]*\w)", "\n".join(texts)))
    assert "engine.settings.table" in named
    for module in named:
        path = ROOT / module.replace(".", "/")
        is_command = (path / "__main__.py").exists() or '__name__ == "__main__"' in path.with_suffix(".py").read_text()
        assert is_command, f"python -m {module} does nothing"


# --- docs/settings.md -----------------------------------------------------------------------------------------------


def test_the_table_of_settings_is_the_codes():
    assert markdown_table() in text_of("docs/settings.md"), "python -m engine.settings.table prints the table"


def test_every_variable_that_the_code_reads_is_on_the_page():
    paths = [path for name in CODE for path in ((ROOT / name).rglob("*.py") if "." not in name else [ROOT / name])]
    reads = re.compile(r'environ(?:\.get|\.setdefault|\.pop)?[(\[]"(\w+)"')
    names = {name for path in paths for name in reads.findall(path.read_text())}
    assert {"RUN_DIR", "CPU_ISA", "MODEL_MIRROR"} < names
    documented = set(re.findall(r"\w+", text_of("docs/settings.md")))
    assert names - documented == {"PATH", "LD_LIBRARY_PATH"}


def test_the_settings_without_effect_are_not_settings():
    envs = {f.metadata["setting"].env for f in fields(config.Config)}
    assert envs.isdisjoint(WITHOUT_EFFECT)


def test_the_page_for_migrating_is_the_codes():
    assert text_of("docs/migrating.md") == migrating_page(), "python -m engine.settings.foreign.page prints the page"


# --- docs/api.md ----------------------------------------------------------------------------------------------------


def plain_names(cell):
    """Return the names in a cell without their aliases."""
    return code_words(cell.partition("(")[0])


def field_rows():
    """Name -> (aliases, default); the last row has several fields that do nothing."""
    rows = {}
    for names, default, _ in table("docs/api.md", "field and aliases"):
        aliases = names.partition("(")[2]
        for name in plain_names(names):
            assert name not in rows
            rows[name] = (tuple(code_words(aliases)), json.loads(default.strip("`") or "null"))
    return rows


def test_the_table_of_fields_has_every_field_with_its_aliases():
    rows = {name: aliases for name, (aliases, _) in field_rows().items()}
    assert rows == {name: aliases for name, (aliases, _) in wire.FIELDS.items()}


def test_the_table_of_fields_has_their_defaults():
    defaults = wire.native_defaults()
    documented = {name: default for name, (_, default) in field_rows().items() if default is not None}
    acts_in_gateway = {"stream": False, "return_usage": False, "timeout": 300}
    assert documented == defaults | acts_in_gateway


def test_the_table_of_fields_says_what_the_document_does():
    rows = {name: cells[2] for cells in table("docs/api.md", "field and aliases") for name in plain_names(cells[0])}
    assert rows == wire.FIELD_DESCRIPTIONS


def test_the_table_of_fields_has_every_limit():
    page = text_of("docs/api.md").partition("## Request fields")[2].partition("## Native answers")[0]
    limits = {name: value for name, value in vars(checks).items() if name.startswith("MAX_")}
    assert len(limits) > 5
    assert {name for name, value in limits.items() if not re.search(rf"\b{value}\b", page)} == set()


def all_kinds(error=RequestError):
    return {(str(error.code), error.kind)}.union(*map(all_kinds, error.__subclasses__()))


def test_the_table_of_errors_has_every_kind_with_its_status():
    rows = {(status, kind.strip("`")) for status, kind, _ in table("docs/api.md", "status")}
    of_http_alone = {(status, "invalid_request") for status in ("404", "405", "408", "413")}
    assert rows == all_kinds() | of_http_alone


def routes(app):
    return {(r.method, r.resource.canonical) for r in app.router.routes() if r.method != "HEAD"}


def test_the_table_of_endpoints_has_every_route():
    cells = [(names, port) for names, port, _ in table("docs/api.md", "method and path")]
    rows = [(*name.split(), port) for names, port in cells for name in code_words(names)]
    by_port = {p: {tuple(row[:2]) for row in rows if row[-1] == p} for p in ("HTTP", "health")}
    assert by_port == {"HTTP": routes(make_app(None, config.Config())), "health": routes(make_health_app(None, 1.0))}


def test_every_field_of_openai_that_is_passed_on_or_refused_is_named():
    section = text_of("docs/api.md").partition("## OpenAI's API")[2]
    assert {*FORWARDED_FIELDS, *PROMPT_OUTPUT_FIELDS, *REFUSED} - set(code_words(section)) == set()
    assert {*FORWARDED_FIELDS, *PROMPT_OUTPUT_FIELDS} & {*REFUSED} == set()


# --- docs/metrics.md ------------------------------------------------------------------------------------------------


def families(vllm_model_name=""):
    """Return name, type and label names of all metrics of a server; the three counters of a histogram are one."""
    counts = DraftCounts("ngram")
    counts.count(1, 1)
    engine = SimpleNamespace(is_up=True, num_open=0, stats={})
    client = SimpleNamespace(stats=counts.stats(), num_restarts=0, engines=[engine, engine])
    service = SimpleNamespace(
        client=client,
        num_open=0,
        latency=LatencyStats(),
        rate_limiter=RateLimiter(),
        vllm_model_name=lambda: vllm_model_name,
    )
    service.rate_limiter.usage_of(Owner("a"))
    found = {}
    for sample in metrics.samples(service, 1):
        found.setdefault((sample.family, sample.kind), set()).update(name for name, _ in sample.labels)
    return found


def test_the_table_of_metrics_has_every_family_with_its_labels():
    documented = {}
    for name, kind, labels, meaning in table("docs/metrics.md", "family"):
        words = code_words(meaning if labels == "one a value" else labels)
        documented[name.strip("`"), kind] = set(words)
    assert documented == families()


def test_the_table_of_vllms_metrics_has_every_family_with_its_labels():
    documented = {
        (name, kind): {"model_name", *code_words(labels)}
        for names, kind, labels, _ in table("docs/metrics.md", "vLLM's family")
        for name in code_words(names)
    }
    assert documented == {each: labels for each, labels in families("m").items() if each[0].startswith("vllm:")}


def test_the_table_of_the_metrics_of_replicas_is_the_codes():
    documented = [
        (name.strip("`"), kind, meaning) for name, kind, _, meaning in table("docs/metrics.md", "replica's family")
    ]
    assert documented == list(replica_metrics.FAMILIES)


def test_the_table_of_fields_without_effect_has_each_with_its_reason():
    documented = {reason: tuple(code_words(names)) for names, reason in table("docs/api.md", "fields")}
    assert documented == ignored_fields.WITHOUT_EFFECT


def test_every_reason_of_an_end_is_named():
    assert set(metrics.END_REASONS) - set(code_words(text_of("docs/metrics.md"))) == set()


def test_the_board_and_the_alerts_ask_for_metrics_that_there_are():
    board, alerts = json.loads(text_of("docs/grafana.json")), yaml.safe_load(text_of("docs/alerts.yml"))
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    assert len(asked) > 20 and len(rules) > 5
    assert [rule["alert"] for rule in rules if not {"expr", "labels", "annotations"} <= set(rule)] == []
    known = {}  # name -> its labels
    for (family, kind), labels in families().items():
        suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        known |= {family + suffix: labels for suffix in suffixes}
    for expression in asked + [rule["expr"] for rule in rules]:
        names = re.findall(r"\b(?:llm|nv|inference)_\w+", expression)
        assert names and [name for name in names if name not in known] == [], expression
        labels = set(re.findall(r"(\w+)=~?\"", expression)) | {
            label for by in re.findall(r"by \(([\w, ]+)\)", expression) for label in by.split(", ")
        }
        assert labels <= {"instance"}.union(*(known[name] for name in names)), expression
        reasons = [each for text in re.findall(r'reason=~?"([\w|]+)"', expression) for each in text.split("|")]
        assert set(reasons) <= set(metrics.END_REASONS), expression


# --- docs/operation.md ----------------------------------------------------------------------------------------------


def test_the_table_of_processes_has_their_logs():
    rows = {name: log.strip("`") for name, log, *_ in table("docs/operation.md", "process")}
    assert rows == LOG_NAMES


# --- docs/ops.md ----------------------------------------------------------------------------------------------------


def test_the_table_of_ops_is_the_catalogues():
    assert documentation() in text_of("docs/ops.md"), "python -m engine.ops.catalogue prints table and formulas"


def test_every_op_of_the_catalogue_has_a_reference_with_its_inputs_and_attributes():
    from engine.ops import reference

    for op in EXPORTED:
        parameters = inspect.signature(getattr(reference, op.name)).parameters
        stored = [each.name for each in op.inputs if each.name not in parameters]  # a format's weights as `*stored`
        given = [each for name in parameters for each in (stored if name == "stored" else [name]) if each != "group"]
        assert given == [*(each.name for each in op.inputs), *(each.name for each in op.attributes)], op.name


def test_every_op_of_the_catalogue_has_a_kernel_for_cpus():
    assert [op.name for op in EXPORTED if not (ROOT / "engine/ops/cpu" / op.header).is_file()] == []


def test_every_op_for_gpus_is_in_the_module_that_the_catalogue_names():
    """Read, not imported: torch need not be there."""
    missing = []
    for op in OPS.values():
        if op.cuda:
            tree = ast.parse(text_of(f"engine/ops/cuda/{op.cuda}.py"))
            defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assigned = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
            defined |= {target.id for target in assigned if isinstance(target, ast.Name)}
            missing += [op.name] * (op.name not in defined)
    assert missing == []
    fused = {name for op in OPS.values() if op.cuda for name in op.fuses}
    mixtures = {op.name for op in EXPORTED if op.is_mixture} | {"moe_route", "add_gated"}
    # GPUs refuse the families that need them.
    only_cpus = mixtures | {op.name for op in (*LATENT_OPS, *STATE_OPS, *VISION_OPS)}
    assert {op.name for op in EXPORTED if not op.cuda} <= fused | only_cpus, (
        "every op can be computed, if only with the one behind it"
    )
