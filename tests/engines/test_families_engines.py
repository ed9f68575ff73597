"""Every family with every precision, and on two ranks: what tests/pure does with some of them."""

from itertools import product

import pytest

from engine.models.families import FAMILIES
from tests import family_checkpoints
from tests.pure.models.test_family_goldens import RANKS_DIFFER, assert_two_ranks_agree
from tests.pure.models.test_support import ON_CPUS, QUICK, assert_computes

REST = [pair for pair in product(FAMILIES, ON_CPUS) if pair not in QUICK]


@pytest.mark.parametrize(("model_type", "precision"), REST, ids=lambda each: getattr(each, "stored", each))
def test_every_family_computes_with_every_precision_on_a_cpu(model_type, precision, exported):
    assert_computes(model_type, precision, exported)


@pytest.mark.parametrize("family", [name for name in family_checkpoints.ALL if name not in RANKS_DIFFER])
def test_two_ranks_compute_what_one_does(family, exported):
    assert_two_ranks_agree(family, exported)
