"""Ranks on the CPU: their sums are those of the definition, bit for bit, and none waits for ever."""

import os
import re
import signal
import socket
import time

import numpy as np
import pytest

from engine.ops import cpu, reference
from engine.ops.cpu import group
from engine.ops.cpu.calls import ArgumentError
from engine.ops.cpu.kernels import GroupError
from tests.pure.ranks import PATIENCE_S, Processes, run_processes, run_threads, tcp_pair

# One value, odd ones, a usual step, longer than a share in memory, rows longer than one.
SHAPES = [(1, 1), (3, 7), (0, 5), (1, 896), (41, 1000), (3, 40000)]


def share_of(rank, shape):
    values = np.random.default_rng([rank, *shape]).standard_normal(shape, np.float32)
    return values * np.float32(10.0 ** (rank % 3))  # so that another order would give other bits


def width_of(shape, num_ranks):
    return num_ranks * shape[1] - shape[1] // 2


def reduce_and_gather(rank):
    num_ranks = cpu.c_library().llm_num_ranks()
    return [_both(cpu.load(), rank, shape, num_ranks) for shape in SHAPES]


def _both(ops, rank, shape, num_ranks):
    x = share_of(rank, shape)
    return ops.all_reduce(x), ops.all_gather(x, num_ranks=num_ranks, width=width_of(shape, num_ranks))


def expected_sum(shape, num_ranks, num_hosts):
    """Return the sum over the ranks of each host, which is then summed over the hosts."""
    per_host = num_ranks // num_hosts
    hosts = [
        run_threads(per_host, lambda rank, ops, host=host: ops.all_reduce(share_of(host * per_host + rank, shape)))
        for host in range(num_hosts)
    ]
    return run_threads(num_hosts, lambda host, ops: ops.all_reduce(hosts[host][0]))[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "hosts"),
    [
        (2, {}),
        (3, {}),
        (4, {}),
        (4, {"num_hosts": 2, "connect": tcp_pair}),
        (3, {"num_hosts": 3}),
    ],
    ids=["2", "3", "4", "4 on 2 hosts", "3 on 3 hosts"],
)
def test_every_rank_has_the_bits_of_the_definition(num_ranks, hosts):
    found = run_processes(num_ranks, reduce_and_gather, **hosts)
    for i, shape in enumerate(SHAPES):
        total = expected_sum(shape, num_ranks, hosts.get("num_hosts", 1))
        side_by_side = np.concatenate([share_of(rank, shape) for rank in range(num_ranks)], axis=1)
        for rank in range(num_ranks):
            assert np.array_equal(found[rank][i][0], total)
            assert np.array_equal(found[rank][i][1], side_by_side[:, : width_of(shape, num_ranks)])


def test_ranks_as_threads_run_the_definition():
    shape = (3, 7)
    total = share_of(0, shape) + share_of(1, shape) + share_of(2, shape)
    side_by_side = np.concatenate([share_of(rank, shape) for rank in range(3)], axis=1)
    for reduced, gathered in run_threads(3, lambda rank, ops: _both(ops, rank, shape, 3)):
        assert np.array_equal(reduced, total)
        assert np.array_equal(gathered, side_by_side[:, :18])


def test_a_process_alone_gets_what_it_brings():
    x = share_of(0, (3, 7))
    for ops in (cpu.load(), reference):
        assert np.array_equal(ops.all_reduce(x), x)
        assert np.array_equal(ops.all_gather(x, num_ranks=1, width=5), x[:, :5])


def sum_together_and_by_pieces(rank):
    x = share_of(rank, (200, 896))
    together = cpu.all_reduce(x)
    pieces = [cpu.all_reduce(x[a:b]) for a, b in ((0, 1), (1, 8), (8, 45), (45, 200))]
    return together, np.concatenate(pieces)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_bits_of_a_row_do_not_depend_on_the_others(num_ranks):
    for together, by_pieces in run_processes(num_ranks, sum_together_and_by_pieces):
        assert np.array_equal(together, by_pieces)


def sum_again_and_again(rank):
    """Sum repeatedly with ranks that are late in turn. The results of one exchange must not show in another."""
    delays = np.random.default_rng(rank).exponential(2e-4, 300)
    for i, delay in enumerate(delays):
        time.sleep(delay)
        found = cpu.all_reduce(np.full((1 + i % 3, 1000), i * 10 + rank, np.float32))
        assert (found == i * 40 + 6).all()


@pytest.mark.slow
def test_late_ranks_mix_nothing_up():
    assert run_processes(4, sum_again_and_again) == [None] * 4
    assert run_processes(4, sum_again_and_again, num_hosts=2) == [None] * 4


def wait_for_a_sleeper(rank):
    cpu.all_reduce(np.zeros((1, 8), np.float32))
    before = time.process_time()
    if rank == 1:
        time.sleep(1)
    cpu.all_reduce(np.zeros((1, 8), np.float32))
    return time.process_time() - before


@pytest.mark.slow
def test_waiting_costs_no_core():
    assert max(run_processes(3, wait_for_a_sleeper)) < 0.2


def die_as_the_last(rank):
    cpu.all_reduce(np.zeros((1, 8), np.float32))
    if rank == cpu.c_library().llm_num_ranks() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        cpu.all_reduce(np.zeros((1, 8), np.float32))
    finally:
        with pytest.raises(GroupError, match="^all_gather: the group of ranks has been ended$"):
            cpu.all_gather(np.zeros((1, 8), np.float32), num_ranks=cpu.c_library().llm_num_ranks(), width=8)


def test_ranks_that_wait_for_a_dead_one_are_released_and_nothing_is_left():
    with Processes(3, die_as_the_last) as ranks:
        assert ranks.result(2) is None
        group.abort(ranks.shared_memory_fds[0])
        released = ranks.results()[:2]
        names = [os.readlink(f"/proc/self/fd/{fd}") for fd in ranks.shared_memory_fds]
    assert [name for name in names if not name.startswith("/memfd:")] == []  # it has no file that could be left
    assert [repr(error) for error in released] == 2 * ["GroupError('all_reduce: the group of ranks has been ended')"]


def die_on_the_last_host(rank):
    cpu.all_reduce(np.zeros((1, 8), np.float32))
    if rank >= 2:
        os.kill(os.getpid(), signal.SIGKILL)
    cpu.all_reduce(np.zeros((1, 8), np.float32))


LOST = r"^all_reduce: the connection to host {} is lost: (it was closed|Connection reset by peer|Broken pipe)$"
ENDED = "^all_reduce: the group of ranks has been ended$"


@pytest.mark.parametrize("connect", [socket.socketpair, tcp_pair])
def test_a_host_that_is_lost_ends_the_group_on_another(connect):
    first, second, *dead = run_processes(4, die_on_the_last_host, num_hosts=2, connect=connect)
    assert dead == [None, None]
    assert re.search(LOST.format(1), str(first))
    assert re.search(ENDED, str(second))


def test_a_host_that_is_lost_ends_the_group_on_two_others():
    """Both see it, unless one has ended already for having seen it, and the other sees that."""
    first, second, _ = run_processes(3, die_on_the_last_host, num_hosts=3)
    assert re.search(LOST.format("[12]"), str(first))
    assert re.search(LOST.format("[02]"), str(second))
    assert "host 2" in f"{first} {second}"


def stay_when_it_ends(rank):
    """Wait for the end of the group after the other rank of the host has died, before this process ends."""
    cpu.all_reduce(np.zeros((1, 8), np.float32))
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        cpu.all_reduce(np.zeros((1, 8), np.float32))
    finally:
        if rank == 2:
            time.sleep(PATIENCE_S)


def test_a_group_that_is_ended_on_one_host_ends_on_the_others():
    with Processes(4, stay_when_it_ends, num_hosts=2, connect=tcp_pair) as ranks:
        assert ranks.result(3) is None
        group.abort(ranks.shared_memory_fds[1])
        assert re.search(LOST.format(1), str(ranks.result(0)))
        assert re.search(ENDED, str(ranks.result(1)))
        assert ranks.processes[2].is_alive()


def bring_something_else(rank):
    cpu.all_reduce(np.zeros((2, 3 + rank), np.float32))


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_ranks_that_are_not_at_the_same_op_say_so(num_hosts):
    errors = list(map(str, run_processes(2, bring_something_else, num_hosts=num_hosts)))
    who = "host" if num_hosts == 2 else "rank"
    message = "all_reduce: this rank is at an all_reduce of {} values, {} {} at an all_reduce of {} values"
    reported = [message.format(6, who, 1, 8), message.format(8, who, 0, 6)]
    # Errors of ranks that another one was faster to end.
    ends = ("has been ended", "it was closed", "reset by peer", "Broken pipe")
    assert errors[0] == reported[0] or errors[1] == reported[1]
    assert all(error in reported or error.endswith(ends) for error in errors)


def use_paddle(rank):
    import paddle

    from engine.ops.cpu.paddle_ops import register_paddle_ops

    paddle.set_device("cpu")
    ops, x = register_paddle_ops(), paddle.full([2, 3], 1.0 + rank)
    found = ops.all_reduce(x).numpy(), ops.all_gather(x, num_ranks=2, width=5).numpy()
    for call in (lambda: ops.all_gather(x, num_ranks=4, width=5), lambda: ops.all_reduce(x[: 1 + rank])):
        with pytest.raises(Exception, match="one of 2|this rank is at|has been ended"):
            call()
    return found


@pytest.mark.slow
def test_paddle_ops_speak_in_the_same_group():
    pytest.importorskip("paddle", reason="needs paddlepaddle")
    for reduced, gathered in run_processes(2, use_paddle):
        assert reduced.tolist() == [[3, 3, 3]] * 2
        assert gathered.tolist() == [[1, 1, 1, 2, 2]] * 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_ranks": 3, "num_hosts": 2}, "num_ranks is 3, it must be a multiple of num_hosts, 2"),
        ({"rank": 2}, "rank is 2, it must be in 0 .. 1"),
        ({"num_hosts": 2}, "rank 0 of 2 has 0 peers, it needs 1"),
    ],
)
def test_a_membership_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError) as raised:
        group.Membership(**{"rank": 0, "num_ranks": 2, "shared_memory_fd": 0, **fields})
    assert str(raised.value) == message


@pytest.fixture
def shared_memory_fd():
    fd = group.create_shared_memory(2)
    yield fd
    group.leave()
    os.close(fd)


def test_a_process_joins_once_and_a_rank_too(shared_memory_fd):
    group.join(group.Membership(1, 2, shared_memory_fd))
    with pytest.raises(GroupError, match="^rank 0 cannot join: this process has joined a group already$"):
        group.join(group.Membership(0, 2, shared_memory_fd))
    with pytest.raises(ArgumentError, match="^all_gather: num_ranks is 1, this process is one of 2$"):
        cpu.all_gather(np.zeros((1, 2), np.float32), num_ranks=1, width=2)
    group.leave()
    with pytest.raises(GroupError, match="^rank 1 cannot join: rank 1 has joined with this shared memory before$"):
        group.join(group.Membership(1, 2, shared_memory_fd))
    with pytest.raises(GroupError, match=r"^rank 0 cannot join: the shared memory has \d+ bytes, 3 ranks on each of 1"):
        group.join(group.Membership(0, 3, shared_memory_fd))


def test_a_host_without_power_is_noticed_by_its_silence(shared_memory_fd):
    near, far = tcp_pair()
    fd = group.create_shared_memory(2, num_hosts=2)
    with near, far:
        group.join(group.Membership(0, 2, fd, 2, (near,)))
        assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, count, each = (
            near.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_KEEPIDLE", "TCP_KEEPCNT", "TCP_KEEPINTVL")
        )
        assert idle + count * each == group.SILENCE_S
    os.close(fd)
