"""Process group: this process is one rank of a model and joins the group in which `all_reduce` and `all_gather`
communicate.

The process that starts the ranks passes memory and connections to them; this module starts no processes and opens no
connections. It does not use MPI, which needs mpirun where hosts are started one by one, keeps a core busy while a rank
waits, and adds numbers up in an order that depends on their count.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_int32, c_int64
from dataclasses import dataclass, field

from engine.ops.cpu.kernels import GroupError
from engine.ops.cpu.library import c_library

SILENCE_S = 15  # after which a host that no longer answers counts as lost


@dataclass(frozen=True)
class Membership:
    """Rank r is on host r // (num_ranks / num_hosts)."""

    rank: int
    num_ranks: int
    # Result of create_shared_memory, the same on all ranks of a host. It may be closed once they have joined.
    shared_memory_fd: int
    num_hosts: int = 1
    peers: tuple[socket.socket, ...] = ()  # of a host's first rank: to those of the other hosts, in the hosts' order
    expert_orders: Mapping[str, Sequence[int]] = field(default_factory=dict)  # `engine.executors.expert_placement`

    @classmethod
    def alone(cls) -> Membership:
        """Return the membership of a single rank, which joins no group."""
        return cls(0, 1, -1)

    @property
    def ranks_per_host(self) -> int:
        return self.num_ranks // self.num_hosts

    def __post_init__(self) -> None:
        if self.num_hosts < 1 or self.num_ranks < 1 or self.num_ranks % self.num_hosts:
            raise ValueError(f"num_ranks is {self.num_ranks}, it must be a multiple of num_hosts, {self.num_hosts}")
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"rank is {self.rank}, it must be in 0 .. {self.num_ranks - 1}")
        needed = 0 if self.rank % self.ranks_per_host else self.num_hosts - 1
        if len(self.peers) != needed:
            raise ValueError(f"rank {self.rank} of {self.num_ranks} has {len(self.peers)} peers, it needs {needed}")


class _Membership(ctypes.Structure):
    """`LlmMembership` of group.h."""

    _fields_ = [
        *((name, c_int64) for name in ("num_hosts", "host", "ranks_per_host", "local_rank")),
        ("shared_memory_fd", c_int32),
        ("peer_fds", POINTER(c_int32)),
    ]


def create_shared_memory(num_ranks: int, num_hosts: int = 1) -> int:
    """Return a file descriptor of the memory that the ranks of one host share during one life of their group. It has no
    name in any folder and disappears with the last process that holds it, however that process ends.
    """
    fd = os.memfd_create("llm_group", os.MFD_CLOEXEC)
    os.ftruncate(fd, c_library().llm_shared_memory_bytes(num_hosts, num_ranks // num_hosts))
    return fd


def join(membership: Membership) -> None:
    """Join the group. From now on the ops of this process are those of a rank. All ranks call the same ops in the same
    order.
    """
    host, local_rank = divmod(membership.rank, membership.ranks_per_host)
    fds = [peer.fileno() for peer in membership.peers]
    for peer in membership.peers:
        notice_silence(peer)
    peer_fds = (c_int32 * membership.num_hosts)(*fds[:host], -1, *fds[host:]) if local_rank == 0 else None
    args = _Membership(
        membership.num_hosts, host, membership.ranks_per_host, local_rank, membership.shared_memory_fd, peer_fds
    )
    if trouble := c_library().llm_join(ctypes.byref(args)):
        raise GroupError(f"rank {membership.rank} cannot join: {trouble.decode()}")
    _joined.append(membership)  # its sockets must stay open


_joined: list[Membership] = []


def leave() -> None:
    """Leave the group, after it has ended or before this process does."""
    c_library().llm_leave()
    _joined.clear()


def abort(shared_memory_fd: int) -> None:
    """End the group: each rank of this host that waits for another one, or will, raises within a tenth of a second. Any
    process that holds the memory may call it.
    """
    os.pwrite(shared_memory_fd, (1).to_bytes(4, "little"), 0)


def notice_silence(peer: socket.socket) -> None:
    """Enable TCP keep-alive, because a host that loses its power does not close its connections."""
    if peer.family not in (socket.AF_INET, socket.AF_INET6):
        return
    options = {"TCP_KEEPIDLE": SILENCE_S // 3, "TCP_KEEPINTVL": SILENCE_S // 3, "TCP_KEEPCNT": 2}
    options |= {"TCP_USER_TIMEOUT": SILENCE_S * 1000, "TCP_NODELAY": 1}
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
