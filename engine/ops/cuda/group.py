"""Process group of the ranks of a model on GPUs: `all_reduce`, `all_gather` and `broadcast`. All ranks call the same
ops in the same order. Each op can be part of a CUDA graph.

The rendezvous is a memory file that the starting process passes to all ranks of a host; several hosts share a TCP store
of the first rank. If every GPU can write to the memory of the others of its host, which is usual, few rows use the
one-shot collectives of `one_shot_all_reduce`, more rows torch's all-reduce over symmetric memory, and the longest steps
NCCL. Otherwise everything uses NCCL. NVLink multicast is never used, because a process that ends during one can leave
the host's GPUs unusable.

Between hosts everything uses NCCL, which sums many rows in two levels by itself: within a host over NVLink, between
hosts over the network. Few rows wait for the network's latency only, of which NCCL's all-reduce pays several. They are
summed within the host first, in one shot; then each rank gathers the sums of all hosts at once and adds them up in
their order, so that all ranks have the same bits.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import uuid
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from engine.errors import SetupError
from engine.ops.cpu.group import Membership
from engine.ops.cuda import one_shot_all_reduce
from engine.ops.cuda.norms import add_rms_norm
from engine.ops.cuda.one_shot_all_reduce import PeerBuffers

SHARED_BYTES = 16 << 20  # largest all-reduce over symmetric memory; above, NCCL is as fast
GATHERED_BYTES = 1 << 20  # of the sums of all hosts that each rank gathers at most; an all-reduce sends less for more
MAX_ADDRESS_BYTES = 1024  # of the TCP store
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13


class _Group(NamedTuple):
    name: str  # of the ranks of all hosts, among torch's groups
    buffers: PeerBuffers | None  # None: the ranks of a host cannot write to each other's memory, or there is only one
    shared: Tensor | None  # u8 [SHARED_BYTES], mapped by the other ranks; only with one host
    # With several hosts, the ranks that have this one's place on each. None with one host, and if all sums are NCCL's.
    across: dist.ProcessGroup | None


_joined: _Group | None = None
_num_joined = 0  # by this process, ever


def join(membership: Membership, device: torch.device) -> None:
    """Join the group and wait for the other ranks. The file of `membership` must be empty and stay open, because torch
    opens it again for each access. On the CPU, for tests, gloo and a mapped file replace NCCL and the GPUs' memory.
    Raises SetupError."""
    global _joined, _num_joined
    if _joined or membership.num_ranks == 1:
        return
    os.environ.update(WITHOUT_MULTICAST)
    num_ranks, num_hosts, size = membership.num_ranks, membership.num_hosts, membership.ranks_per_host
    is_gpu, place = device.type == "cuda", membership.rank % size
    of_host = dist.FileStore(f"/proc/self/fd/{membership.shared_memory_fd}", size)
    store = of_host if num_hosts == 1 else _store_of_hosts(membership, of_host)
    kinds = {"backend": "nccl", "device_id": device} if is_gpu else {"backend": "gloo"}
    try:
        dist.init_process_group(**kinds, store=store, rank=membership.rank, world_size=num_ranks)
    except dist.DistError as error:
        hint = "NCCL_DEBUG=INFO shows more, and NCCL_SOCKET_IFNAME selects the network interface"
        raise SetupError(f"rank {membership.rank} cannot reach the other GPUs ({error}); {hint}") from error
    world = dist.group.WORLD
    assert world
    here, across = (world, None) if num_hosts == 1 else _groups_of(membership)
    buffers = shared = None
    num_bytes, may_share = PeerBuffers.num_bytes(size), _may_share(membership, store, is_gpu)
    memory: list[Tensor] = []
    if size > 1 and may_share:
        memory = _symmetric(num_bytes, device, here) if is_gpu else _mapped_files(num_bytes, membership, store)
        if is_gpu and num_hosts == 1:
            shared = _symmetric(SHARED_BYTES, device, here)[place]
        memory[place].zero_()
    dist.barrier()
    if memory:
        addresses = torch.tensor([each.data_ptr() for each in memory], device=device)
        calls = torch.zeros(one_shot_all_reduce.MAX_PROGRAMS, dtype=torch.int32, device=device)
        buffers = PeerBuffers(place, size, memory, addresses, calls)
    _joined = _Group(world.group_name, buffers, shared, across if buffers or size == 1 else None)
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
    buffers, across = _joined.buffers, _joined.across
    is_one_shot = bool(buffers and buffers.fits(len(x), one_shot_all_reduce.words_of(x)))
    is_gathered = bool(across and x.nbytes * dist.get_world_size(across) <= GATHERED_BYTES)
    if buffers and is_one_shot and (is_gathered or not across):
        x = one_shot_all_reduce.all_reduce(buffers, x, None, None, 0)
        if not across:
            return x
    if across and is_gathered and (is_one_shot or not buffers):
        return _sum_of_hosts(across, x)
    if _joined.shared is None or x.nbytes > SHARED_BYTES:
        dist.all_reduce(x)
        return x
    shared = _joined.shared[: x.nbytes].view(x.dtype).view(x.shape)
    shared.copy_(x)
    return torch.ops.symm_mem.two_shot_all_reduce_out(shared, "sum", _joined.name, x)


def all_reduce_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, epsilon: float) -> tuple[Tensor, Tensor]:
    """Compute `all_reduce`, then `add_rms_norm`."""
    buffers = _buffers_of_all()
    if buffers and len(x) and buffers.fits(len(x), one_shot_all_reduce.words_of(x)):
        return one_shot_all_reduce.all_reduce(buffers, x, residual, weight, epsilon), residual
    return add_rms_norm(all_reduce(x), residual, weight, epsilon=epsilon)


def all_gather(x: Tensor, *, num_ranks: int, width: int) -> Tensor:
    """Return x [S, N] of all ranks side by side, in rank order, cut to [S, width]."""
    if _joined is None or not len(x):
        return x[:, :width].contiguous()
    buffers = _buffers_of_all()
    if buffers and buffers.fits(len(x) * -(-x.shape[1] // one_shot_all_reduce.CAPACITY)):
        return one_shot_all_reduce.all_gather(buffers, x, width)
    shares = x.new_empty(num_ranks, *x.shape)
    ALL_GATHER(shares.flatten(0, 1), x)
    return shares.transpose(0, 1).reshape(len(x), -1)[:, :width].contiguous()


def broadcast(numbers: Tensor) -> Tensor:
    """Return the first rank's `numbers`, i32 [T], which may be overwritten."""
    if _joined is None:
        return numbers
    if (buffers := _buffers_of_all()) and len(numbers) <= one_shot_all_reduce.CAPACITY:
        return one_shot_all_reduce.broadcast(buffers, numbers)
    dist.broadcast(numbers, 0)
    return numbers


def peers_of(row: Tensor) -> PeerBuffers | None:
    """Return the buffers through which ranks can sum a row like this one [1, N] that its programs have sent."""
    buffers = _buffers_of_all()
    return buffers if buffers and buffers.fits(1, one_shot_all_reduce.words_of(row)) else None


def _buffers_of_all() -> PeerBuffers | None:
    """Return the buffers that connect all ranks; None if there are several hosts."""
    return _joined.buffers if _joined and not _joined.across else None


def _sum_of_hosts(across: dist.ProcessGroup, x: Tensor) -> Tensor:
    """Add up a few rows of each host in the order of the hosts."""
    sums = x.new_empty(dist.get_world_size(across), *x.shape)
    ALL_GATHER(sums.flatten(0, 1), x, group=across)
    return sums.sum(0)


def _store_of_hosts(membership: Membership, of_host: dist.Store) -> dist.Store:
    """Return a store that the ranks of all hosts share. The first rank serves it on a free port of its address.

    The first rank of each other host gets the port, and a secret that all names in the store begin with, over the
    connection of the hosts, which accepts no others; the other ranks of a host get them through `of_host`."""
    if membership.rank == 0:
        ip = membership.peers[0].getsockname()[0]
        listener = socket.create_server((ip, 0), family=membership.peers[0].family)
        address = ip, listener.getsockname()[1], uuid.uuid4().hex
        serving = {"is_master": True, "master_listen_fd": listener.detach()}
        store = dist.TCPStore(*address[:2], wait_for_workers=False, **serving)
        for peer in membership.peers:
            with Connection(os.dup(peer.fileno())) as connection:
                connection.send_bytes(json.dumps(address).encode())
    else:
        if membership.peers:
            with Connection(os.dup(membership.peers[0].fileno())) as connection:
                of_host.set("store", connection.recv_bytes(MAX_ADDRESS_BYTES).decode())
        address = json.loads(of_host.get("store"))
        store = dist.TCPStore(*address[:2], wait_for_workers=False)
    if membership.rank == 0:
        of_host.set("store", json.dumps(address))
    return dist.PrefixStore(address[2], store)


def _groups_of(membership: Membership) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the groups of the ranks of this host, and of the ranks that have this one's place on each host."""
    ranks, size = [*range(membership.num_ranks)], membership.ranks_per_host
    if size == 1:
        return dist.group.WORLD, dist.group.WORLD
    host, place = divmod(membership.rank, size)
    here = [dist.new_group(ranks[first : first + size]) for first in ranks[::size]]
    across = [dist.new_group(ranks[first::size]) for first in range(size)]
    return here[host], across[place]


def _may_share(membership: Membership, store: dist.Store, is_gpu: bool) -> bool:
    """Return whether every GPU can write to the memory of the others of its host, and this is the first group of every
    rank's process. Torch numbers the rendezvous of symmetric memory from the start of a process, so those of a later
    group would not find each other."""
    here = range(membership.ranks_per_host)
    can = all(torch.cuda.can_device_access_peer(a, b) for a in here for b in here if a != b) if is_gpu else True
    store.set(f"sharing of {membership.rank}", f"{can and not (is_gpu and _num_joined)}")
    return all(store.get(f"sharing of {rank}") == b"True" for rank in range(membership.num_ranks))


def _symmetric(num_bytes: int, device: torch.device, group: dist.ProcessGroup) -> list[Tensor]:
    """Allocate symmetric memory. Return that of each rank of the group, as mapped here."""
    from torch.distributed import _symmetric_memory as symmetric

    own = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(own, group)
    ranks = range(handle.world_size)
    return [own if r == handle.rank else handle.get_buffer(r, own.shape, own.dtype) for r in ranks]


def _mapped_files(num_bytes: int, membership: Membership, store: dist.Store) -> list[Tensor]:
    """Map a file of each rank of this host."""
    own = os.memfd_create("llm_buffers")
    os.ftruncate(own, num_bytes)
    store.set(f"buffers of {membership.rank}", f"/proc/{os.getpid()}/fd/{own}")
    size, memory = membership.ranks_per_host, []
    first = membership.rank // size * size
    for rank in range(first, first + size):
        with open(store.get(f"buffers of {rank}").decode(), "r+b") as file:
            memory.append(torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8))
    return memory
