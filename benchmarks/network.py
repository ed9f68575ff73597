"""Network namespaces of one machine, which act as separate machines: each has a link to a bridge in one more namespace,
in which this process runs then. Traffic does not leave them.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x20000
RATE = ("tbf", "rate", "1gbit", "burst", "1mb", "latency", "50ms")


class Network:
    """Namespaces for `count` machines. Where they cannot be made, all machines share the loopback interface."""

    def __init__(self, count: int):
        self._count = count
        self._names = [f"bench{os.getpid()}-{i}" for i in range(count)]
        self._bridge = f"bench{os.getpid()}-bridge"
        self.has_links = False

    def address(self, number: int) -> str:
        """Return the address of a machine."""
        return f"10.231.79.{number + 1}" if self.has_links else f"127.0.0.{number + 1}"

    def enter(self, number: int) -> list[str]:
        """Return the beginning of a command that runs on a machine."""
        return ["ip", "netns", "exec", self._names[number]] if self.has_links else []

    def set_link(self, number: int, up: bool) -> None:
        """Connect a machine to the others, or cut it off."""
        _ip("-n", self._bridge, "link", "set", f"port{number}", "up" if up else "down")

    def __enter__(self) -> Network:
        try:
            self._make()
        except (OSError, subprocess.CalledProcessError) as error:
            self._remove()
            print(f"no network namespaces: {getattr(error, 'stderr', '') or error}", file=sys.stderr)
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _make(self) -> None:
        for name in (*self._names, self._bridge):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", self._bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._bridge, "address", "add", "10.231.79.254/24", "dev", "bridge")
        _ip("-n", self._bridge, "link", "set", "bridge", "up")
        for i, name in enumerate(self._names):
            port = ("type", "veth", "peer", "name", f"port{i}", "netns", self._bridge)
            _ip("-n", name, "link", "add", "wire", *port)
            _ip("-n", name, "address", "add", f"10.231.79.{i + 1}/24", "dev", "wire")
            _ip("-n", self._bridge, "link", "set", f"port{i}", "master", "bridge", "up")
            _ip("-n", name, "link", "set", "wire", "up")
            subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "wire", "root", *RATE], check=True)
        with open(f"/run/netns/{self._bridge}") as file:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(file.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWNS):
                raise OSError(ctypes.get_errno(), "the namespace cannot be entered")
        # NIXL looks there for network interfaces. Other processes keep their mounts, as with `ip netns exec`.
        for command in (["--make-rslave", "/"], ["-t", "sysfs", "sysfs", "/sys"]):
            subprocess.run(["mount", *command], check=True, capture_output=True, text=True)
        self.has_links = True

    def _remove(self) -> None:
        for name in (*self._names, self._bridge):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
