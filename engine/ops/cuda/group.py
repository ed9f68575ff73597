"""This process as one rank of a model on the GPUs of one machine: joins the group in which `all_reduce`, `all_gather`
and `of_first` speak. All ranks call the same ops in the same order; each can be part of a CUDA graph.

The ranks meet in a file of memory, which whoever starts them hands on. Where every GPU can write into the others'
memory, which those of one host mostly can, a few rows go by packets (`engine.ops.cuda.packets`), more through torch's
sum over symmetric memory, and the longest steps through NCCL; where not, all goes through NCCL. NVLink's multicast is
never used: a process that ends in the middle of it can leave the host's GPUs unusable.
"""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from engine.ops.cpu.group import Membership
from engine.ops.cuda import packets
from engine.ops.cuda.norms import add_rms_norm
from engine.ops.cuda.packets import Mailbox

SHARED_BYTES = 16 << 20  # of a sum; above, NCCL is as fast
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13


class _Group(NamedTuple):
    name: str  # among torch's groups
    box: Mailbox | None  # None: the ranks cannot write into each other's memory
    shared: Tensor | None  # u8 [SHARED_BYTES], which the others map


_joined: _Group | None = None
_num_joined = 0  # by this process, ever


def join(membership: Membership, device: torch.device) -> None:
    """Waits for the other ranks. `membership`: with an empty file, which must stay open, as torch opens it anew when it
    looks into it. On the CPU, for tests, gloo and a mapped file take the place of NCCL and of the GPUs' memory."""
    global _joined, _num_joined
    if _joined or membership.num_ranks == 1:
        return
    os.environ.update(WITHOUT_MULTICAST)
    rank, num_ranks, is_gpu = membership.rank, membership.num_ranks, device.type == "cuda"
    store = dist.FileStore(f"/proc/self/fd/{membership.segment_fd}", num_ranks)
    kinds = {"backend": "nccl", "device_id": device} if is_gpu else {"backend": "gloo"}
    dist.init_process_group(**kinds, store=store, rank=rank, world_size=num_ranks)
    world = dist.group.WORLD
    assert world
    box = shared = None
    num_bytes = Mailbox.num_bytes(num_ranks)
    if not is_gpu:
        boxes = _mapped_files(num_bytes, membership, store)
    elif _may_share(membership, store):
        boxes, shared = _symmetric(num_bytes, device), _symmetric(SHARED_BYTES, device)[rank]
    else:
        boxes = []
    if boxes:
        boxes[rank].zero_()
        dist.barrier()
        addresses = torch.tensor([each.data_ptr() for each in boxes], device=device)
        calls = torch.zeros(packets.MAX_PROGRAMS, dtype=torch.int32, device=device)
        box = Mailbox(rank, num_ranks, boxes, addresses, calls)
    _joined = _Group(world.group_name, box, shared)
    _num_joined += 1


def leave() -> None:
    """This process is alone again. CUDA graphs with ops of the group in them must be gone."""
    global _joined
    if _joined:
        _joined = None
        dist.destroy_process_group()


def all_reduce(x: Tensor) -> Tensor:
    """The sum over all ranks, with the same bits on each of them. x [T, N], which may be changed."""
    if _joined is None or not x.numel():
        return x
    if _joined.box and _joined.box.takes(len(x), packets.words_of(x)):
        return packets.add_up(_joined.box, x, None, None, 0)
    if _joined.shared is None or x.nbytes > SHARED_BYTES:
        dist.all_reduce(x)
        return x
    shared = _joined.shared[: x.nbytes].view(x.dtype).view(x.shape)
    shared.copy_(x)
    return torch.ops.symm_mem.two_shot_all_reduce_out(shared, "sum", _joined.name, x)


def all_reduce_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, epsilon: float) -> tuple[Tensor, Tensor]:
    """`all_reduce`, then `add_rms_norm`."""
    if _joined and _joined.box and len(x) and _joined.box.takes(len(x), packets.words_of(x)):
        return packets.add_up(_joined.box, x, residual, weight, epsilon), residual
    return add_rms_norm(all_reduce(x), residual, weight, epsilon=epsilon)


def all_gather(x: Tensor, *, num_ranks: int, width: int) -> Tensor:
    """[S, N] of each rank side by side, in their order: [S, width]; columns beyond are cut off."""
    if _joined is None or not len(x):
        return x[:, :width].contiguous()
    if _joined.box and _joined.box.takes(len(x) * -(-x.shape[1] // packets.ROOM)):
        return packets.put_together(_joined.box, x, width)
    shares = x.new_empty(num_ranks, *x.shape)
    ALL_GATHER(shares.flatten(0, 1), x)
    return shares.transpose(0, 1).reshape(len(x), -1)[:, :width].contiguous()


def of_first(numbers: Tensor) -> Tensor:
    """The first rank's; i32 [T], which may be changed."""
    if _joined is None:
        return numbers
    if _joined.box and len(numbers) <= packets.ROOM:
        return packets.of_first(_joined.box, numbers)
    dist.broadcast(numbers, 0)
    return numbers


def _may_share(membership: Membership, store: dist.Store) -> bool:
    """Whether every GPU can write into the others' memory, and this is the first group of every rank's process: torch
    counts the meetings for symmetric memory since a process began, and those of a later group would miss each other."""
    everybody = range(membership.num_ranks)
    store.set(f"groups of {membership.rank}", str(_num_joined))
    return all(store.get(f"groups of {rank}") == b"0" for rank in everybody) and all(
        torch.cuda.can_device_access_peer(a, b) for a in everybody for b in everybody if a != b
    )


def _symmetric(num_bytes: int, device: torch.device) -> list[Tensor]:
    """Memory of each rank, as this one sees it."""
    from torch.distributed import _symmetric_memory as symmetric

    own = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(own, dist.group.WORLD)
    everybody = range(handle.world_size)
    return [own if r == handle.rank else handle.get_buffer(r, own.shape, own.dtype) for r in everybody]


def _mapped_files(num_bytes: int, membership: Membership, store: dist.Store) -> list[Tensor]:
    own = os.memfd_create("llm_packets")
    os.ftruncate(own, num_bytes)
    store.set(f"packets of {membership.rank}", f"/proc/{os.getpid()}/fd/{own}")
    boxes = []
    for rank in range(membership.num_ranks):
        with open(store.get(f"packets of {rank}").decode(), "r+b") as file:
            boxes.append(torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8))
    return boxes
