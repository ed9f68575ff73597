"""Several ranks as one executor: which models are refused, and what the first rank tells the others."""

import shutil

import pytest

from engine.core.types import Arrival, Batch, Copy, Row, Sampling, Swaps
from engine.errors import ConfigError
from engine.executors import make_executor
from engine.executors.ranks import LAUNCH, pack, unpack, unpack_batch
from engine.models.keys import ModelError
from engine.settings.config import Config
from tests.pure.test_company import BLOCK_SIZE


def test_a_model_that_was_exported_for_another_number_of_ranks_is_refused(exported):
    graph_dir = exported("qwen2", block_size=BLOCK_SIZE)
    with pytest.raises(ConfigError, match="MP_NUM is 2, but .* was exported for 1 rank"):
        make_executor(graph_dir, Config(mp_num=2))


def test_a_model_of_which_a_rank_is_missing_is_refused(exported, tmp_path):
    broken = shutil.copytree(exported("qwen2", block_size=BLOCK_SIZE, num_ranks=2), tmp_path / "broken")
    (broken / "rank_1" / "model.pdiparams").unlink()
    with pytest.raises(ModelError, match="rank_1/model.pdiparams is missing"):
        make_executor(broken, Config(mp_num=2))


def test_a_batch_is_the_same_after_its_way_to_another_rank():
    sampling = Sampling(5, temperature=0.5, stop_token_ids=(1, 2), bad_words=((3, 4),), logit_bias=((7, 0.5),))
    row = Row(1, 17, [5, 6], [8], 2, [0, 3])
    rows, arrivals, swaps = [row, Row(2, 0, [1])], [Arrival(1, [1, 2, 3], 3, sampling)], Swaps([(7, 0)], [])
    batch = Batch(rows, arrivals, [Copy(1, 2, 3, 4)], True, swaps=swaps)
    kind, *fields = unpack(pack(LAUNCH, *batch))
    sent = unpack_batch(fields)
    assert kind == LAUNCH
    assert pack(*sent) == pack(*batch)
    assert sent.arrivals[0].sampling == sampling
    assert [tuple(row.token_ids) for row in sent.rows] == [(5, 6), (1,)]
    assert (sent.copies, sent.has_mask, sent.swaps) == ([Copy(1, 2, 3, 4)], True, Swaps(((7, 0),), ()))
