"""Process group of the ranks of a model on the GPUs of one machine: `all_reduce`, `all_gather` and `broadcast`. All
ranks call the same ops in the same order. Each op can be part of a CUDA graph.

The rendezvous is a memory file that the starting process passes to all ranks. If every GPU can write to the memory of
the others, which is usual within a host, few rows use the one-shot collectives of `one_shot_all_reduce`, more rows
torch's all-reduce over symmetric memory, and the longest steps NCCL. Otherwise everything uses NCCL. NVLink multicast
is never used, because a process that ends during one can leave the host's GPUs unusable.
"""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from engine.ops.cpu.group import Membership
from engine.ops.cuda import one_shot_all_reduce
from engine.ops.cuda.norms import add_rms_norm
from engine.ops.cuda.one_shot_all_reduce import PeerBuffers

SHARED_BYTES = 16 << 20  # largest all-reduce over symmetric memory; above, NCCL is as fast
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13


class _Group(NamedTuple):
    name: str  # among torch's groups
    buffers: PeerBuffers | None  # None: the ranks cannot write to each other's memory
    shared: Tensor | None  # u8 [SHARED_BYTES], mapped by the other ranks


_joined: _Group | None = None
_num_joined = 0  # by this process, ever


def join(membership: Membership, device: torch.device) -> None:
    """Join the group and wait for the other ranks. The file of `membership` must be empty and stay open, because torch
    opens it again for each access. On the CPU, for tests, gloo and a mapped file replace NCCL and the GPUs' memory."""
    global _joined, _num_joined
    if _joined or membership.num_ranks == 1:
        return
    os.environ.update(WITHOUT_MULTICAST)
    rank, num_ranks, is_gpu = membership.rank, membership.num_ranks, device.type == "cuda"
    store = dist.FileStore(f"/proc/self/fd/{membership.shared_memory_fd}", num_ranks)
    kinds = {"backend": "nccl", "device_id": device} if is_gpu else {"backend": "gloo"}
    dist.init_process_group(**kinds, store=store, rank=rank, world_size=num_ranks)
    world = dist.group.WORLD
    assert world
    buffers = shared = None
    num_bytes = PeerBuffers.num_bytes(num_ranks)
    if not is_gpu:
        memory = _mapped_files(num_bytes, membership, store)
    elif _may_share(membership, store):
        memory, shared = _symmetric(num_bytes, device), _symmetric(SHARED_BYTES, device)[rank]
    else:
        memory = []
    if memory:
        memory[rank].zero_()
        dist.barrier()
        addresses = torch.tensor([each.data_ptr() for each in memory], device=device)
        calls = torch.zeros(one_shot_all_reduce.MAX_PROGRAMS, dtype=torch.int32, device=device)
        buffers = PeerBuffers(rank, num_ranks, memory, addresses, calls)
    _joined = _Group(world.group_name, buffers, shared)
    _num_joined += 1


def leave() -> None:
    """Leave the group. CUDA graphs that contain ops of the group must have been freed before."""
    global _joined
    if _joined:
        _joined = None
        dist.destroy_process_group()


def all_reduce(x: Tensor) -> Tensor:
    """Return the sum over all ranks, with the same bits on each. x [T, N] may be overwritten."""
    if _joined is None or not x.numel():
        return x
    if _joined.buffers and _joined.buffers.fits(len(x), one_shot_all_reduce.words_of(x)):
        return one_shot_all_reduce.all_reduce(_joined.buffers, x, None, None, 0)
    if _joined.shared is None or x.nbytes > SHARED_BYTES:
        dist.all_reduce(x)
        return x
    shared = _joined.shared[: x.nbytes].view(x.dtype).view(x.shape)
    shared.copy_(x)
    return torch.ops.symm_mem.two_shot_all_reduce_out(shared, "sum", _joined.name, x)


def all_reduce_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, epsilon: float) -> tuple[Tensor, Tensor]:
    """Compute `all_reduce`, then `add_rms_norm`."""
    if _joined and _joined.buffers and len(x) and _joined.buffers.fits(len(x), one_shot_all_reduce.words_of(x)):
        return one_shot_all_reduce.all_reduce(_joined.buffers, x, residual, weight, epsilon), residual
    return add_rms_norm(all_reduce(x), residual, weight, epsilon=epsilon)


def all_gather(x: Tensor, *, num_ranks: int, width: int) -> Tensor:
    """Return x [S, N] of all ranks side by side, in rank order, cut to [S, width]."""
    if _joined is None or not len(x):
        return x[:, :width].contiguous()
    if _joined.buffers and _joined.buffers.fits(len(x) * -(-x.shape[1] // one_shot_all_reduce.CAPACITY)):
        return one_shot_all_reduce.all_gather(_joined.buffers, x, width)
    shares = x.new_empty(num_ranks, *x.shape)
    ALL_GATHER(shares.flatten(0, 1), x)
    return shares.transpose(0, 1).reshape(len(x), -1)[:, :width].contiguous()


def broadcast(numbers: Tensor) -> Tensor:
    """Return the first rank's `numbers`, i32 [T], which may be overwritten."""
    if _joined is None:
        return numbers
    if _joined.buffers and len(numbers) <= one_shot_all_reduce.CAPACITY:
        return one_shot_all_reduce.broadcast(_joined.buffers, numbers)
    dist.broadcast(numbers, 0)
    return numbers


def _may_share(membership: Membership, store: dist.Store) -> bool:
    """Return whether every GPU can write to the memory of the others, and this is the first group of every rank's
    process. Torch numbers the rendezvous of symmetric memory from the start of a process, so those of a later group
    would not find each other."""
    ranks = range(membership.num_ranks)
    store.set(f"groups of {membership.rank}", str(_num_joined))
    return all(store.get(f"groups of {rank}") == b"0" for rank in ranks) and all(
        torch.cuda.can_device_access_peer(a, b) for a in ranks for b in ranks if a != b
    )


def _symmetric(num_bytes: int, device: torch.device) -> list[Tensor]:
    """Allocate symmetric memory. Return that of each rank, as mapped here."""
    from torch.distributed import _symmetric_memory as symmetric

    own = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(own, dist.group.WORLD)
    ranks = range(handle.world_size)
    return [own if r == handle.rank else handle.get_buffer(r, own.shape, own.dtype) for r in ranks]


def _mapped_files(num_bytes: int, membership: Membership, store: dist.Store) -> list[Tensor]:
    own = os.memfd_create("llm_buffers")
    os.ftruncate(own, num_bytes)
    store.set(f"buffers of {membership.rank}", f"/proc/{os.getpid()}/fd/{own}")
    memory = []
    for rank in range(membership.num_ranks):
        with open(store.get(f"buffers of {rank}").decode(), "r+b") as file:
            memory.append(torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8))
    return memory
