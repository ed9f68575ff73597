"""The ranks of several machines as one executor. The engine of the master serves, those of the other hosts follow it:
each does what it is told over its connection, as a rank does, and passes it on to its own ranks.

A host that ends or falls silent ends the engines of all: HostLost. Who started them starts them again, and they meet
again.
"""

from __future__ import annotations

import contextlib
import hashlib
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

from engine.core.types import Batch, Executor, Step
from engine.errors import HostLost
from engine.executors import LOADING, make_host
from engine.executors.meeting import call_meeting, find_meeting, lost
from engine.executors.ranks import RanksExecutor, serve, wait_until_ready
from engine.exporting.manifest import CONFIG, MANIFEST
from engine.ops.cpu import group
from engine.settings.config import Config

log = logging.getLogger(__name__)

NOTICED_S = group.SILENCE_S / 3 + 1  # until it is known everywhere that a host has ended
Tell = Callable[[str], None]


class HostsExecutor(RanksExecutor):
    """`first` is this host's executor; behind `others` are hosts that follow."""

    def launch(self, batch: Batch) -> Step:
        with noticed_first():
            return StepOfHosts(super().launch(batch))


class StepOfHosts:
    def __init__(self, step: Step):
        self._step = step
        self.mask, self.drafts = step.mask, step.drafts

    def result(self) -> Any:
        with noticed_first():
            return self._step.result()


def lead(graph_dir: Path, config: Config, tell: Tell) -> Executor:
    """The executor of all hosts, made by the master. Tells for whom it waits; raises HostLost."""
    machines = config.machines
    followers, peers = call_meeting(machines, config.inter_node_port, facts(graph_dir, config), tell)
    tell(LOADING)
    executor = make_host(graph_dir, config, peers)
    for ip, follower in zip(machines.ips[1:], followers, strict=True):
        with lost(ip):
            wait_until_ready([follower])
        end_with(follower, ip)
    return HostsExecutor(executor, followers)


def follow(graph_dir: Path, config: Config, tell: Tell) -> NoReturn:
    """What the engine does on a host that is not the master, until that ends: raises HostLost. Tells what it waits for,
    in the end nothing."""
    machines = config.machines
    tell(f"waits for {machines.ips[0]}, which serves")
    master, peers = find_meeting(machines, config.inter_node_port, facts(graph_dir, config))
    tell(LOADING)
    executor = make_host(graph_dir, config, peers)
    end_with(master, machines.ips[0])
    log.info("ready: %s", machines.why_not_served)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # there is nothing to finish; our children die with us
    tell("")
    with noticed_first():
        serve(master, executor)
    raise HostLost(machines.ips[0])


def facts(graph_dir: Path, config: Config) -> dict[str, Any]:
    """What must be the same on all hosts."""
    model = hashlib.sha256(b"".join((graph_dir / name).read_bytes() for name in (MANIFEST, CONFIG)))
    names = ",".join(config.machines.ips)
    settings = {"MP_NUM": config.mp_num, "POD_IPS": names, "BATCH_SIZE": config.batch_size}
    return {**settings, f"the hash of {MANIFEST} and {CONFIG}": model.hexdigest()[:16]}


def end_with(connection: Connection, ip: str) -> None:
    """This process ends when the host at the other end does: our ranks may wait for it in the middle of an op."""

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
def noticed_first() -> Iterator[None]:
    """An op or a connection that fails when another host ends does so before `end_with` may have noticed that."""
    try:
        yield
    except Exception:
        time.sleep(NOTICED_S)
        raise
