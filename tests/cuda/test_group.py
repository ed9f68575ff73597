"""All-reduce, all-gather and broadcast among ranks, for few rows and for many."""

import itertools
import multiprocessing
import os
import time
import traceback
from multiprocessing import reduction
from multiprocessing.connection import wait
from typing import NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install .[cuda]")

from engine.ops.cpu.group import Membership  # noqa: E402
from engine.ops.cuda import group, norms, rank_products  # noqa: E402
from engine.ops.cuda.experts import expert_down  # noqa: E402
from engine.ops.cuda.one_shot_all_reduce import CAPACITY, MAX_PROGRAMS  # noqa: E402
from engine.ops.cuda.products import linear, linear_add  # noqa: E402
from tests.cuda.conftest import IS_INTERPRETED  # noqa: E402
from tests.pure.ranks import tcp_pair  # noqa: E402

PATIENCE_S = 180
DTYPES = [torch.float32] if IS_INTERPRETED else [torch.float32, torch.bfloat16]
MANY_ROWS = MAX_PROGRAMS + 1  # more than the one-shot all-reduce takes
SHAPES = [(1, 64), (3, 4096), (5, 66), (MANY_ROWS, 8), (2, 2 * CAPACITY + 2)]


def on_ranks(num_ranks, body, *args, num_hosts=1):
    """Return the results of body(rank, device, *args) on each rank, in processes of their own. Hosts are those of
    `Membership`; all of them are this machine."""
    context, size = multiprocessing.get_context("spawn"), num_ranks // num_hosts
    fds, processes, results = [os.memfd_create("rendezvous") for _ in range(num_hosts)], [], []
    of_master = [tcp_pair() for _ in range(num_hosts - 1)]  # hosts use no other connections
    for rank in range(num_ranks):
        result, theirs = context.Pipe(duplex=False)
        host, peers = rank // size, ()
        if rank % size == 0 and num_hosts > 1:
            peers = [ours for ours, _ in of_master] if host == 0 else [of_master[host - 1][1]] * (num_hosts - 1)
        place = (rank, num_ranks, reduction.DupFd(fds[host]), num_hosts, tuple(peers))
        processes.append(context.Process(target=_run, args=(place, body, args, theirs)))
        processes[-1].start()
        theirs.close()
        results.append(result)
    try:
        return answers_of(results)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for fd in fds:
            os.close(fd)
        for end in itertools.chain(*of_master):
            end.close()


def _run(place, body, args, result):
    rank, num_ranks, shared, *hosts = place
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        group.join(Membership(rank, num_ranks, shared.detach(), *hosts), device)
        answer = body(rank, device, *args)
        group.leave()
    except Exception:
        answer = Failure(traceback.format_exc())
    result.send(answer)
    result.close()
    os._exit(0)  # who has failed may have kernels on the GPU that wait for other ranks


class Failure(NamedTuple):
    why: str


def answers_of(results):
    """Return the results in rank order. The first rank that fails fails the test, whatever the others do."""
    answers, deadline = {}, time.monotonic() + PATIENCE_S
    while len(answers) < len(results):
        ready = wait([result for result in results if result not in answers], deadline - time.monotonic())
        assert ready, f"hang: ranks {[rank for rank, result in enumerate(results) if result not in answers]}"
        for result in ready:
            answers[result] = result.recv()
            if isinstance(answers[result], Failure):
                pytest.fail(f"rank {results.index(result)}: {answers[result].why}")
    return [answers[result] for result in results]


def of_rank(rank, turn, shape, dtype):
    """Return the input of a rank on the CPU. It is the same wherever it is computed."""
    numbers = np.random.default_rng([rank, turn, *shape]).standard_normal(shape)
    return torch.from_numpy(numbers).to(torch.float32).to(dtype)


def sums(rank, device, num_turns):
    found = []
    for turn in range(num_turns):
        for shape in SHAPES:
            for dtype in DTYPES:
                found.append(group.all_reduce(of_rank(rank, turn, shape, dtype).to(device)).float().cpu().numpy())
    return found


def test_a_sum_is_that_of_all_ranks_with_the_same_bits_on_each(num_ranks):
    check_sums(num_ranks, 1)


@pytest.mark.parametrize(("num_ranks", "num_hosts"), [(2, 2), (4, 2), (3, 3)], indirect=["num_ranks"])
def test_a_sum_is_that_of_all_hosts_with_the_same_bits_on_each_rank(num_ranks, num_hosts):
    """A row with more words than a program of the one-shot all-reduce sends is summed by NCCL alone."""
    check_sums(num_ranks, num_hosts)


def check_sums(num_ranks, num_hosts):
    num_turns = 3 if IS_INTERPRETED else 200  # a set of buffers is used again after two calls
    answers = on_ranks(num_ranks, sums, num_turns, num_hosts=num_hosts)
    cases = [(turn, shape, dtype) for turn in range(num_turns) for shape in SHAPES for dtype in DTYPES]
    for (turn, shape, dtype), found in zip(cases, zip(*answers, strict=True), strict=True):
        expected = sum(of_rank(rank, turn, shape, dtype).float() for rank in range(num_ranks)).numpy()
        assert all(np.array_equal(each, found[0]) for each in found), (turn, shape, dtype)
        np.testing.assert_allclose(found[0], expected, atol=1e-5 if dtype == torch.float32 else 4e-2, rtol=1e-2)


def normed(rank, device):
    found = []
    for shape in SHAPES:
        for dtype in DTYPES:
            x, residual = (of_rank(which, 0, shape, dtype).to(device) for which in (rank, 9))
            weight = torch.linspace(0.5, 2, shape[1], device=device)
            both = group.all_reduce_add_rms_norm(x.clone(), residual.clone(), weight, epsilon=1e-5)
            apart = norms.add_rms_norm(group.all_reduce(x), residual, weight, epsilon=1e-5)
            found.append([each.float().cpu().numpy() for each in (*both, *apart)])
    return found


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_a_sum_and_its_norm_are_the_same_together_and_apart(num_ranks, num_hosts):
    for per_rank in on_ranks(num_ranks, normed, num_hosts=num_hosts):
        for y, residual, expected_y, expected_residual in per_rank:
            np.testing.assert_allclose(y, expected_y, atol=2e-2 if len(DTYPES) > 1 else 1e-5, rtol=1e-2)
            np.testing.assert_allclose(residual, expected_residual, atol=2e-2 if len(DTYPES) > 1 else 1e-5, rtol=1e-2)


def summed_products(rank, device):
    """Return norms and residuals of the sums of products, of which those of one row are sent by their programs."""
    found = []
    for num_rows in (1,) if IS_INTERPRETED else (1, 2, 1, 1):
        for dtype in DTYPES:
            x, residual = (of_rank(which, num_rows, (num_rows, 96), dtype).to(device) for which in (rank, 9))
            matrices = of_rank(rank, 1, (4 * 96, 96), dtype).to(device)
            norm, ids = torch.linspace(0.5, 2, 96, device=device), torch.tensor([[2, 0]] * num_rows, device=device)
            ids, weights = ids.to(torch.int32), torch.full((num_rows, 2), 0.25, device=device)
            both, given = x.repeat(1, 2), (ids, weights, matrices, None)
            products = [
                (rank_products.linear_all_reduce_add_rms_norm, linear, (x, matrices[:96], None), {}),
                (rank_products.linear_add_all_reduce_add_rms_norm, linear_add, (x, matrices[96:192], None, x), {}),
                (rank_products.expert_down_all_reduce_add_rms_norm, expert_down, (both, *given), {"num_experts": 4}),
            ]
            for fused, product, inputs, sizes in products:
                found.append([*fused(*inputs, residual.clone(), norm, epsilon=1e-5, **sizes)])
                found[-1] += group.all_reduce_add_rms_norm(
                    product(*inputs, **sizes), residual.clone(), norm, epsilon=1e-5
                )
    return [[each.float().cpu().numpy() for each in case] for case in found]


def test_products_that_their_programs_send_have_the_same_sums(num_ranks):
    for per_rank in on_ranks(num_ranks, summed_products):
        for y, residual, expected_y, expected_residual in per_rank:
            np.testing.assert_array_equal(y, expected_y)
            np.testing.assert_array_equal(residual, expected_residual)


GATHERED = [(1, 7, 13), (3, 4097, 8194), (2, 5, 10), (MANY_ROWS, 4, 7)]  # rows, of each rank, of all that are wanted


def gathered(rank, device):
    found = [
        group.all_gather(of_rank(rank, 0, (rows, own), torch.float32).to(device), num_ranks=2, width=width)
        for rows, own, width in GATHERED
    ]
    return [(each.is_contiguous(), each.cpu().numpy()) for each in found]


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_shares_are_put_side_by_side_and_cut_off(two_devices, num_hosts):
    for answer in on_ranks(2, gathered, num_hosts=num_hosts):
        for (rows, own, width), (is_contiguous, found) in zip(GATHERED, answer, strict=True):
            shares = [of_rank(rank, 0, (rows, own), torch.float32).numpy() for rank in range(2)]
            assert is_contiguous
            np.testing.assert_array_equal(found, np.concatenate(shares, 1)[:, :width])


def firsts(rank, device):
    counts = [1, 100, CAPACITY, CAPACITY + 1]
    numbers = [torch.arange(count, dtype=torch.int32, device=device) * (1 - 2 * rank) for count in counts]
    return [group.broadcast(each).cpu().numpy() for each in numbers]


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_every_rank_has_the_numbers_of_the_first(two_devices, num_hosts):
    for answer in on_ranks(2, firsts, num_hosts=num_hosts):
        for found in answer:
            np.testing.assert_array_equal(found, np.arange(len(found)))


def graphed(rank, device):
    """Return the sums of several replays of one graph, with changing inputs, next to sums outside of graphs."""
    x, shown = torch.zeros(2, 4096, dtype=torch.bfloat16, device=device), []
    group.all_reduce(x.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        few = group.all_reduce(x.clone())
        many = group.all_reduce(x.expand(300, 2, 4096).reshape(600, 4096).clone())
        longest = group.all_reduce(x.expand(2000, 2, 4096).reshape(4000, 4096).clone())
        wide = group.all_gather(x.float().expand(20, 2, 4096).reshape(40, 4096), num_ranks=2, width=8192)
    for turn in range(20):
        x.fill_(turn * (rank + 1))
        alone = group.all_reduce(x.clone())
        graph.replay()
        shown.append([each[-1, -1].item() for each in (alone, few, many, longest, wide)])
    torch.cuda.synchronize()
    del graph
    return shown


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter has no CUDA graphs")
@pytest.mark.parametrize("num_hosts", [1, 2])
def test_sums_are_part_of_cuda_graphs(two_devices, num_hosts):
    for answer in on_ranks(2, graphed, num_hosts=num_hosts):
        assert answer == [[3.0 * turn] * 4 + [2.0 * turn] for turn in range(20)]
