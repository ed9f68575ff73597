"""KV blocks that other processes read with NIXL: over InfiniBand or RoCE where there is an adapter, otherwise over TCP
or, on one host, from memory to memory. Independent of the device, whose memory is described by `LocalBlocks`."""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from engine.errors import ConfigError
from engine.executors.block_access import BlockAccess, Moves, SharedCaches
from engine.settings.config import Config
from engine.settings.disaggregation import DECODE, NIXL

MODULES = "nixl_cu13", "nixl_cu12"  # of the packages nixl-cu13 and nixl-cu12; either works without CUDA
DEFAULTS = {"NIXL_LOG_LEVEL": "WARN", "UCX_MEM_MMAP_HOOK_MODE": "none"}  # the latter: do not patch malloc
THREAD_WAIT_US = 20_000  # at most, for events
STAGING_BYTES = 128 << 20  # of each rank of a decode instance
MIN_SLOTS = 8


class Region(NamedTuple):
    """Memory that holds blocks: for each layer the address of its cache, whose blocks lie one after another."""

    addresses: Sequence[int]
    num_blocks: int
    layer_bytes: int  # of a block in one layer


class LocalBlocks(BlockAccess, Protocol):
    """Blocks of one rank, with a staging area of the same layout in the memory of its device."""

    @property
    def memory(self) -> tuple[str, int]:
        """Return DRAM or VRAM, as NIXL calls them, and the index of the device."""
        ...

    def region(self) -> Region: ...

    def stage(self, num_slots: int) -> Region:
        """Allocate the staging area."""
        ...

    def digests(self, blocks: Sequence[int]) -> list[bytes]: ...

    def copy(self, peer: int, moves: Moves) -> list[bytes]:
        """Copy slots of the staging area, which is the peer STAGED, to blocks. Return the digests of what was read."""
        ...


class _Peer(NamedTuple):
    """Caches of another process that are open here."""

    agent: str
    device: int
    region: Region


class NixlBlocks:
    """Access to the blocks of one rank (see `FetchedBlocks`). Owns an agent of NIXL, which has a thread of its own.

    Blocks are read into a staging area and not into the KV cache, because NIXL cannot cancel a read: one that was given
    up still writes when the other process continues, even after its peer was removed. The digest tells if it writes a
    slot that is used again; slots that were given back last are used last.
    """

    def __init__(self, local: LocalBlocks):
        self._local, self._agent = local, _make_agent()
        self._staged: Region | None = None
        self._peers: dict[int, _Peer] = {}
        self._handles: dict[int, Any] = {}  # of reads that have not ended, by their ids
        self._failed: dict[int, str] = {}  # why reads have failed that have not begun

    @property
    def num_steps(self) -> int:
        return self._local.num_steps

    def read_block(self, block: int) -> bytes:
        return self._local.read_block(block)

    def write_block(self, block: int, content: bytes | memoryview) -> None:
        self._local.write_block(block, content)

    def digests(self, blocks: Sequence[int]) -> list[bytes]:
        return self._local.digests(blocks)

    def copy(self, peer: int, moves: Moves) -> list[bytes]:
        return self._local.copy(peer, moves)

    def share(self) -> list[SharedCaches]:
        region = self._local.region()
        self._register(region)
        agent = self._agent.get_agent_metadata(), self._local.memory[1]
        return [(region.num_blocks, [agent, *((b"", address) for address in region.addresses)])]

    def stage(self) -> int:
        region = self._local.region()
        num_slots = _num_slots(region.layer_bytes * len(region.addresses))
        self._staged = self._local.stage(num_slots)
        self._register(self._staged)
        return num_slots

    def open(self, peer: int, shared: Sequence[SharedCaches]) -> None:
        [(num_blocks, [(metadata, device), *layers])] = shared
        region, ours = Region([address for _, address in layers], num_blocks, 0), self._local.region()
        if len(region.addresses) != len(ours.addresses):
            raise ValueError(f"{len(region.addresses)} caches were shared, this model has {len(ours.addresses)}")
        try:
            agent = self._agent.add_remote_agent(metadata)
        except Exception as error:  # NIXL has a class for each of its errors, without a common one
            raise OSError(_text(error)) from None
        self._peers[peer] = _Peer(agent, device, region._replace(layer_bytes=ours.layer_bytes))

    def close(self, peer: int) -> None:
        if opened := self._peers.pop(peer, None):
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(opened.agent)  # its reads fail

    def fetch(self, read_id: int, peer: int, moves: Moves) -> None:
        opened = self._peers.get(peer)
        if opened is None or not all(0 <= block < opened.region.num_blocks for block, _ in moves):
            self._failed[read_id] = "a block is not one of those that are shared"
            return
        assert self._staged is not None
        blocks, slots = zip(*moves, strict=True)
        try:
            sides = (
                self._places(self._staged, slots, self._local.memory[1]),
                self._places(opened.region, blocks, opened.device),
            )
            self._handles[read_id] = self._agent.initialize_xfer("READ", *sides, opened.agent)
            self._agent.transfer(self._handles[read_id])  # if it fails at once, its state says so
        except Exception as error:
            self._failed[read_id] = _text(error)

    def fetched(self, read_id: int) -> str | None:
        reason = self._failed.pop(read_id, "")
        if (handle := self._handles.get(read_id)) and not reason:
            try:
                state = self._agent.check_xfer_state(handle)
            except Exception as error:
                state = _text(error)
            if state == "PROC":
                return None
            reason = "" if state == "DONE" else state
        if handle := self._handles.pop(read_id, None):
            with contextlib.suppress(Exception):
                self._agent.release_xfer_handle(handle)
        return reason

    def _register(self, region: Region) -> None:
        """Let NIXL access memory. Raises OSError."""
        kind, device = self._local.memory
        size = region.num_blocks * region.layer_bytes
        try:
            self._agent.register_memory([(address, size, device, "") for address in region.addresses], kind)
        except Exception as error:
            raise OSError(f"{_text(error)}; NIXL locks the memory, which `ulimit -l` may limit") from None

    def _places(self, region: Region, blocks: Sequence[int], device: int) -> Any:
        """Return the descriptors of all layers of blocks."""
        starts = np.array(region.addresses, np.uint64) + np.array(blocks, np.uint64)[:, None] * np.uint64(
            region.layer_bytes
        )
        found = np.full((starts.size, 3), region.layer_bytes, np.uint64)
        found[:, 0], found[:, 2] = starts.reshape(-1), device
        return self._agent.get_xfer_descs(found, self._local.memory[0])


def staging_bytes(config: Config, block_bytes: int) -> int:
    """Return the size of the staging area of each rank. `block_bytes` is the size of a block of one rank."""
    is_needed = config.kv_transfer == NIXL and config.splitwise_role == DECODE
    return _num_slots(block_bytes) * block_bytes if is_needed else 0


def _num_slots(block_bytes: int) -> int:
    return max(MIN_SLOTS, STAGING_BYTES // block_bytes)


def with_nixl(local: LocalBlocks, config: Config) -> BlockAccess:
    """Return the access to blocks that KV_TRANSFER asks for. Raises ConfigError if NIXL is not installed."""
    return NixlBlocks(local) if config.kv_transfer == NIXL else local


def _make_agent() -> Any:
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    for name in MODULES:
        try:
            nixl = importlib.import_module(f"{name}._api")
        except ModuleNotFoundError:
            continue
        except ImportError as error:
            raise ConfigError(f"KV_TRANSFER is {NIXL}, but its package cannot be loaded: {error}") from None
        return _agent_that_waits(nixl)
    raise ConfigError(f"KV_TRANSFER is {NIXL}, which needs a package: pip install --no-deps nixl-cu13")


def _agent_that_waits(nixl: Any) -> Any:
    """Return an agent whose thread waits for events. NIXL's Python code sets no delay, and the thread then keeps a core
    busy."""
    bindings = nixl.nixlBind
    plain: Any = bindings.nixlAgentConfig

    class WaitingConfig(plain):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, THREAD_WAIT_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = WaitingConfig
    try:
        return nixl.nixl_agent(secrets.token_hex(8), nixl.nixl_agent_config())
    finally:
        bindings.nixlAgentConfig = plain


def _text(error: Exception) -> str:
    return f"NIXL: {error or type(error).__name__}"
