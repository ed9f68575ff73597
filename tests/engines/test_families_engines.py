"""Every family with several precisions, and on two ranks: what tests/pure does with some of them.

Each precision is computed by every eighth family, and by each of them with EVERY_PRECISION=1, which takes minutes more.
"""

import os

import pytest

from engine.models.families import FAMILIES
from tests import family_checkpoints
from tests.mixture_checkpoints import MIXTURES
from tests.pure.models.test_family_goldens import RANKS_DIFFER, assert_two_ranks_agree
from tests.pure.models.test_support import OF_EXPERTS, ON_CPUS, QUICK, assert_computes

SHARE = 1 if os.environ.get("EVERY_PRECISION") else 8
PAIRS = [
    (family, precision)
    for row, family in enumerate(FAMILIES)
    for column, precision in enumerate(ON_CPUS)
    if (row + column) % SHARE == 0 and (family, precision) not in QUICK
    if family in MIXTURES or precision is not OF_EXPERTS
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("model_type", "precision"), PAIRS, ids=lambda each: getattr(each, "stored", each))
def test_a_family_computes_with_a_precision_on_a_cpu(model_type, precision, exported):
    assert_computes(model_type, precision, exported)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", [name for name in family_checkpoints.ALL if name not in RANKS_DIFFER])
def test_two_ranks_compute_what_one_does(family, exported):
    assert_two_ranks_agree(family, exported)
