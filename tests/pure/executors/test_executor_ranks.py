"""Several ranks as one executor: which models are refused, and what the first rank tells the others."""

import shutil
from concurrent.futures import TimeoutError
from multiprocessing.connection import Pipe
from types import SimpleNamespace

import pytest

from engine.core.spans import PromptSpan
from engine.core.types import Arrival, Batch, Copy, Row, Sampling, Swaps
from engine.errors import ConfigError
from engine.executors import make_executor
from engine.executors.distributed.blocks import BlocksOfRanks, serve_blocks
from engine.executors.distributed.ranks import ALLOCATE, LAUNCH, READY, pack, serve, unpack, unpack_batch
from engine.models.config_fields import ModelError
from engine.settings.config import Config
from tests.patience import PATIENCE_S, in_background
from tests.pure.executors.test_batch_invariance import BLOCK_SIZE


def test_a_model_that_was_exported_for_another_number_of_ranks_is_refused(exported):
    graph_dir = exported("qwen2", block_size=BLOCK_SIZE)
    with pytest.raises(ConfigError, match="MP_NUM is 2, .* was exported for 1; set MP_NUM=1"):
        make_executor(graph_dir, Config(mp_num=2))


def test_a_model_of_which_a_rank_is_missing_is_refused(exported, tmp_path):
    broken = shutil.copytree(exported("qwen2", block_size=BLOCK_SIZE, num_ranks=2), tmp_path / "broken")
    (broken / "rank_1" / "model.pdiparams").unlink()
    with pytest.raises(ModelError, match="rank_1/model.pdiparams is missing"):
        make_executor(broken, Config(mp_num=2))


def test_a_batch_is_the_same_after_its_way_to_another_rank():
    sampling = Sampling(5, temperature=0.5, stop_token_ids=(1, 2), bad_words=((3, 4),), logit_bias=((7, 0.5),))
    row, span = Row(1, 17, [5, 6], [8], 2, [0, 3]), PromptSpan(1, 2, b"what", b"numbers", (1, 1, 2))
    rows, arrivals, swaps = [row, Row(2, 0, [1])], [Arrival(1, [1, 2, 3], 3, sampling, [span])], Swaps([(7, 0)], [])
    batch = Batch(rows, arrivals, [Copy(1, 0, 2, 3, 4)], True, swaps=swaps)
    kind, *fields = unpack(pack(LAUNCH, *batch))
    sent = unpack_batch(fields)
    assert kind == LAUNCH
    assert pack(*sent) == pack(*batch)
    assert sent.arrivals[0].sampling == sampling
    assert sent.arrivals[0].spans == [span]
    assert [tuple(row.token_ids) for row in sent.rows] == [(5, 6), (1,)]
    assert (sent.copies, sent.has_mask, sent.swaps) == ([Copy(1, 0, 2, 3, 4)], True, Swaps(((7, 0),), ()))


@pytest.mark.parametrize(
    ("runs_ahead", "expected"),
    [
        (False, "launch 0, wait 0, launch 1, wait 1, launch 2, wait 2, allocate, launch 3, wait 3, close"),
        (True, "launch 0, launch 1, wait 0, launch 2, wait 1, wait 2, allocate, launch 3, close"),
    ],
)
def test_a_rank_runs_as_far_ahead_as_the_first(runs_ahead, expected):
    done = []

    def launch(batch):
        number = batch.rows[0].start
        done.append(f"launch {number}")
        return SimpleNamespace(result=lambda: done.append(f"wait {number}"))

    executor = SimpleNamespace(runs_ahead=runs_ahead, launch=launch)
    executor.allocate = lambda num_blocks: done.append("allocate")
    executor.close = lambda: done.append("close")
    messages = [pack(LAUNCH, *Batch([Row(0, number, [1])])) for number in range(4)]
    messages.insert(3, pack(ALLOCATE, 7))

    def recv_bytes():
        if not messages:
            raise EOFError
        return messages.pop(0)

    serve(SimpleNamespace(send_bytes=done.append, recv_bytes=recv_bytes), executor)
    assert done.pop(0) == pack(READY)
    assert ", ".join(done) == expected


class RankWithBlocks:
    """Rank whose blocks are bytes by number."""

    def __init__(self, num_steps):
        self.num_steps, self.written = num_steps, {}

    def read_block(self, block):
        return self.written[block]

    def write_block(self, block, content):
        self.written[block] = content


def test_blocks_of_all_ranks_are_written_and_are_read_when_their_step_has_ended_everywhere():
    (ours, theirs), first, other = Pipe(), RankWithBlocks(num_steps=1), RankWithBlocks(num_steps=0)
    serve_blocks(theirs, lambda: other)
    access = BlocksOfRanks(first, [ours])
    access.write_block(3, b"abcd")
    assert (first.written, other.written) == ({3: b"ab"}, {3: b"cd"})
    reading = in_background(access.read_block, 3)
    with pytest.raises(TimeoutError):
        reading.result(0.05)
    other.written[3], other.num_steps = b"CD", 1
    assert reading.result(PATIENCE_S) == b"abCD"
    ours.close()
