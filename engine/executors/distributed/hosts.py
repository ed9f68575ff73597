"""Executor of the ranks on several machines. The master's engine serves requests; the engines of the other hosts follow
it: each executes the messages that it receives over its connection, as a rank does, and forwards them to its own ranks.

A host that ends or stops responding ends the engines of all hosts with HostLost. Their supervisors restart them, and
they connect again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from engine.core.executor import Step
from engine.core.types import Batch, StepOutput
from engine.errors import HostLost
from engine.executors import LOADING, make_host
from engine.executors.device_executor import DeviceExecutor
from engine.executors.distributed.ranks import RanksExecutor, serve, wait_until_ready
from engine.executors.distributed.rendezvous import join_master, raise_host_lost, wait_for_followers
from engine.executors.step import Mask
from engine.exporting.files import CONFIG, MANIFEST, model_hash
from engine.log import Report
from engine.ops.cpu import group
from engine.settings.config import Config
from engine.settings.device import GPU

log = logging.getLogger(__name__)

# Settings by which every GPU rank finds the sizes of what it allocates and captures, which must be equal.
GPU_RANK_SETTINGS = [
    *("MAX_NUM_BATCHED_TOKENS", "USE_CUDAGRAPH", "CUDAGRAPH_CAPTURE_SIZES", "SWAP_SPACE", "EXPERTS_ON_HOST"),
    *("SPECULATE_METHOD", "SPECULATE_MAX_DRAFT_TOKEN_NUM", "MAX_LORAS", "MAX_LORA_RANK"),
]
DETECTION_S = group.SILENCE_S / 3 + 1  # seconds until every host has detected that another one ended


class HostsExecutor(RanksExecutor):
    """Executor of all hosts, which the master owns. `first` is this host's executor; `others` connect to the following
    hosts."""

    def launch(self, batch: Batch) -> Step:
        with delay_errors():
            return StepOfHosts(super().launch(batch))

    def compute(self, batch: Batch, wait_for_mask: Callable[[], Mask]) -> StepOutput:
        with delay_errors():
            return super().compute(batch, wait_for_mask)

    def _draft(self, method: str, argument: Any, call_first: Callable[[], Any]) -> Any:
        with delay_errors():
            return super()._draft(method, argument, call_first)

    @contextlib.contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Close the connections to the other hosts after a lost one had time to be detected through them."""
        with super()._all_or_none(), delay_errors():
            yield


class StepOfHosts:
    """A step on all hosts. `result` raises only after a lost host had time to be detected."""

    def __init__(self, step: Step):
        self._step = step
        self.mask, self.drafts = step.mask, step.drafts

    def result(self) -> Any:
        with delay_errors():
            return self._step.result()


def lead(graph_dir: Path, config: Config, report: Report) -> DeviceExecutor:
    """Make the executor of all hosts, on the master. Pass to `report` which hosts are missing. Raises HostLost."""
    machines = config.machines
    followers, peers = wait_for_followers(
        machines, config.inter_node_port, comparable_settings(graph_dir, config), report
    )
    report(LOADING)
    executor = make_host(graph_dir, config, peers)
    for ip, follower in zip(machines.ips[1:], followers, strict=True):
        with raise_host_lost(ip):
            wait_until_ready([follower])
        exit_with_host(follower, ip)
    return HostsExecutor(executor, followers)


def follow(graph_dir: Path, config: Config, report: Report) -> NoReturn:
    """Run the engine of a host that is not the master, until the master ends. It then raises HostLost.

    `report` receives what the engine waits for, and an empty string once it is ready.
    """
    machines = config.machines
    report(f"waits for {machines.ips[0]}, which serves")
    master, peers = join_master(machines, config.inter_node_port, comparable_settings(graph_dir, config))
    report(LOADING)
    executor = make_host(graph_dir, config, peers)
    exit_with_host(master, machines.ips[0])
    log.info("ready: %s", machines.why_not_served)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # child processes die with this one
    report("")
    with delay_errors():
        serve(master, executor)
    raise HostLost(machines.ips[0])


def comparable_settings(graph_dir: Path, config: Config) -> dict[str, Any]:
    """Return the settings that must be equal on all hosts, by names that error messages can show."""
    names = ",".join(config.machines.ips)
    equal = {"MP_NUM": config.mp_num, "POD_IPS": names, "BATCH_SIZE": config.batch_size, "DEVICE": config.device}
    equal[f"the hash of {MANIFEST} and {CONFIG}"] = model_hash(graph_dir)
    if config.device != GPU:
        return equal
    import torch

    equal["the version of NCCL"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else ""
    return equal | {name: getattr(config, name.lower()) for name in GPU_RANK_SETTINGS}


def exit_with_host(connection: Connection, ip: str) -> None:
    """End this process when the host at the other end of `connection` ends. Our ranks may be waiting for it inside an
    op."""

    def watch() -> None:
        poll = select.poll()
        poll.register(connection, select.POLLRDHUP)
        poll.poll()
        if not connection.closed:
            log.error("%s; the engine starts anew and waits for it", HostLost(ip))
            logging.shutdown()
            os._exit(HostLost.exit_status)

    threading.Thread(target=watch, name=f"watches {ip}", daemon=True).start()


@contextlib.contextmanager
def delay_errors() -> Iterator[None]:
    """Delay any exception until `exit_with_host` has had time to detect a lost host, which may be its cause."""
    try:
        yield
    except Exception:
        time.sleep(DETECTION_S)
        raise
