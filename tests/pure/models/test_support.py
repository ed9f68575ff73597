"""The support matrix of docs/models.md is what the code computes and what the tests of each device cover."""

import re
from pathlib import Path

import numpy as np
import pytest

from engine.errors import ConfigError
from engine.exporting.export import QUANT_TYPES
from engine.exporting.export_options import options_of
from engine.models import support
from engine.models.config_fields import read_json
from engine.models.families import FAMILIES, read_model
from engine.models.support import NOT_RUN, REFUSED, RUN
from engine.ops import cpu
from engine.settings.config import Config
from tests import checkpoints, family_checkpoints
from tests.paged_model import PagedModel
from tests.pure.models.test_ranks import answers_of_ranks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PROMPT = list(range(3, 11))
# Mean difference of a log-probability from float32, as a share of their standard deviation, in models of 64 channels.
LARGEST_ERROR = {"float32": 0.0, "bfloat16": 0.03, "weight_only_int8": 0.08, "a8w8": 0.08}
LARGEST_ERROR |= {
    "weight_only_int4": 0.5,
    "weight_only_int4_g32": 0.5,
    "weight_only_fp8": 0.2,
    "a8w8_fp8": 0.2,
    "block_wise_fp8": 0.25,
    "a8w8_fp8_wint4": 0.5,
    "mxfp4": 0.5,
    True: 0.03,
}
ON_CPUS = [each for each in support.PRECISIONS if each.devices[0] == RUN]
[INT8] = [each for each in ON_CPUS if each.option[1] == "weight_only_int8"]
[OF_EXPERTS] = [each for each in ON_CPUS if each.option[1] == "mxfp4"]
OTHERS = [each for each in ON_CPUS if each not in (INT8, OF_EXPERTS)]
QUICK = [*((name, INT8) for name in FAMILIES), *(("gemma3_text", each) for each in OTHERS), ("gpt_oss", OF_EXPERTS)]


def model_types(golden):
    return {keys.get("model_type", name) for name, keys in golden.items()}


def cuda_tests():
    return "\n".join(path.read_text() for path in (ROOT / "tests/cuda").glob("*.py"))


def test_the_documentation_has_the_matrix_of_the_code():
    page = (ROOT / "docs/models.md").read_text()
    for table in (support.family_table(), support.precision_table()):
        assert table in page, "python -m engine.models.support prints the tables"


def test_the_readme_names_the_models_of_every_family():
    readme = (ROOT / "README.md").read_text()
    names = {re.match("[A-Za-z]+", each.models)[0] for each in support.FAMILIES}
    assert [name for name in sorted(names) if name not in readme] == []


def test_the_matrix_has_every_family_of_the_registry():
    assert [each.model_type for each in support.FAMILIES] == [*dict.fromkeys(e.model_type for e in support.FAMILIES)]
    assert {each.model_type for each in support.FAMILIES} == set(FAMILIES)


def test_the_matrix_has_every_precision_of_an_export():
    values = {value for name, value in (each.option for each in support.PRECISIONS) if name == "quant_type"}
    assert values == set(QUANT_TYPES) - {"none"}


def test_families_that_ran_on_a_gpu_are_in_the_gpu_tests():
    """The families of tests/cuda/test_families.py may be marked when they have run."""
    ran = {each.model_type for each in support.FAMILIES if each.devices[2] == RUN}
    assert 'parametrize("family", FAMILIES)' in (ROOT / "tests/cuda/test_executor.py").read_text()
    assert "params=ON_GPUS" in (ROOT / "tests/cuda/test_families.py").read_text()
    others = {each.model_type for each in support.FAMILIES if each.devices[2] in (NOT_RUN, REFUSED)}
    assert ran == (model_types(checkpoints.FAMILIES) | model_types(family_checkpoints.ALL)) - others


def test_families_on_several_gpus_are_those_whose_ranks_the_gpu_tests_run():
    """The families of the test of every family may be marked when they have run."""
    ran = {each.model_type for each in support.FAMILIES if each.devices[3] == RUN}
    tests = (ROOT / "tests/cuda/test_ranks.py").read_text()
    assert 'parametrize("family", ON_GPUS)' in tests
    names = set(re.findall(r'\("(\w+)", (?:\d|BY_EXPERTS)\)', tests))
    dense = {checkpoints.FAMILIES[name]["model_type"] for name in names & set(checkpoints.FAMILIES)}
    others = {each.model_type for each in support.FAMILIES if each.devices[3] == NOT_RUN}
    assert ran == (dense | model_types(family_checkpoints.ALL)) - others


@pytest.mark.parametrize("precision", support.PRECISIONS, ids=lambda each: each.stored)
def test_a_precision_that_ran_on_a_gpu_is_in_the_gpu_tests(precision):
    name, value = precision.option
    mentioned = re.search(rf'"{value}"' if isinstance(value, str) else rf'"{name}": {value}', cuda_tests())
    assert mentioned or precision.devices[2] != RUN


def test_float16_is_refused_on_cpus(a_checkpoint):
    [precision] = [each for each in support.PRECISIONS if REFUSED in each.devices]
    assert precision.option == ("dtype", "float16")
    with pytest.raises(ConfigError, match="only GPUs"):
        options_of(Config(dtype="float16", device="cpu"), a_checkpoint)


def assert_computes(model_type, precision, exported):
    known = checkpoints.FAMILIES | family_checkpoints.ALL
    family = next(name for name, keys in known.items() if keys.get("model_type", name) == model_type)
    wanted, found = (
        PagedModel.of(exported(family, block_size=16, **options), cpu).prefill(PROMPT, chunk=1000, num_logits=8)
        for options in ({}, dict([precision.option]))
    )
    assert np.isfinite(found).all()
    errors = np.sort(np.abs(found - wanted).mean(axis=1))
    bound = LARGEST_ERROR[precision.option[1]]
    if read_model(read_json(exported(family, block_size=16) / "config.json")).mixture:
        # rounding makes some tokens choose other experts
        errors, bound = errors[: len(errors) // 2], 2 * bound
    assert errors.mean() <= bound * wanted.std()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("model_type", "precision"), QUICK, ids=lambda each: getattr(each, "stored", each))
def test_every_family_computes_in_eight_bits_on_a_cpu_and_one_with_every_precision(model_type, precision, exported):
    """Others are in tests/engines."""
    assert_computes(model_type, precision, exported)


@pytest.mark.parametrize("precision", ON_CPUS, ids=lambda each: each.stored)
def test_two_ranks_compute_with_every_precision_that_one_does(precision, exported):
    assert precision.devices[1] == RUN
    name, value = precision.option
    family = "gpt_oss" if precision is OF_EXPERTS else "qwen2"
    wanted = PagedModel.of(exported(family), cpu).prefill(PROMPT, chunk=4, num_logits=2)
    found = answers_of_ranks(exported(family, num_ranks=2, **{name: value}), 2, PROMPT)
    for logits, _ in found:
        assert np.abs(logits - wanted).mean() <= max(LARGEST_ERROR[value], 1e-4) * wanted.std()


def test_cells_have_known_values():
    rows = (*support.FAMILIES, *support.PRECISIONS)
    assert {cell for each in rows for cell in each.devices} <= {RUN, NOT_RUN, REFUSED}
    assert {len(each.devices) for each in rows} == {len(support.DEVICES)}
