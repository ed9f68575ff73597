"""Hosts that serve a model together, and the part of this host. Opens no connections."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from engine.errors import ConfigError


@dataclass(frozen=True)
class Machines:
    """The hosts in the order of their ranks: the first one, the master, serves."""

    ips: tuple[str, ...] = ("127.0.0.1",)
    host: int = 0  # this one
    num_ranks: int = 1  # on all of them

    @property
    def num_hosts(self) -> int:
        return len(self.ips)

    @property
    def is_master(self) -> bool:
        return self.host == 0

    @property
    def ranks(self) -> range:
        """Return the ranks of this host."""
        count = self.num_ranks // self.num_hosts
        return range(self.host * count, (self.host + 1) * count)

    @property
    def exported_ranks(self) -> tuple[int, ...]:
        """Return the ranks whose weights this host needs of an exported model; empty for all."""
        return tuple(self.ranks) if self.num_hosts > 1 else ()

    @property
    def why_not_served(self) -> str:
        """Return the reason with which this host refuses requests; empty on the host that serves them."""
        if self.is_master:
            return ""
        *others, last = map(str, self.ranks)
        ranks = f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
        return f"this host holds {ranks} of the model; requests are served by {self.ips[0]}"


def read_machines(num_hosts: int, num_ranks: int, texts: Mapping[str, str]) -> Machines:
    """Read the hosts from `texts`, which has POD_IPS, POD_0_IP and HOST_IP. Raises ConfigError that names the variable
    and what was expected.
    """
    pod_ips = texts["POD_IPS"]
    listed = [_ip("POD_IPS", text) for text in pod_ips.split(",")] if pod_ips else []
    if len(listed) != num_hosts and (listed or num_hosts > 1):
        raise ConfigError(f"POD_IPS is {pod_ips!r}, it must have one address for each of MP_NNODE={num_hosts} hosts")
    if num_hosts == 1:
        return Machines(num_ranks=num_ranks)
    if num_ranks % num_hosts:
        raise ConfigError(f"MP_NUM is {num_ranks}, it must be a multiple of MP_NNODE, {num_hosts}: ranks of all hosts")
    if len(set(listed)) != num_hosts:
        raise ConfigError(f"POD_IPS is {pod_ips!r}, it must not name a host twice")
    master = _ip_of("POD_0_IP", texts["POD_0_IP"] or listed[0], listed)
    ips = (master, *(ip for ip in listed if ip != master))
    return Machines(ips, ips.index(_ip_of("HOST_IP", texts["HOST_IP"] or _own(listed), listed)), num_ranks)


def _ip(name: str, text: str) -> str:
    try:
        return str(ip_address(text.strip()))
    except ValueError:
        what = "an IP address" if name != "POD_IPS" else "IP addresses with commas between them"
        raise ConfigError(f"{name} has {text!r}, it must be {what}") from None


def _ip_of(name: str, text: str, listed: list[str]) -> str:
    if (ip := _ip(name, text)) not in listed:
        raise ConfigError(f"{name} is {text!r}, it must be one of POD_IPS, {','.join(listed)}")
    return ip


def _own(listed: list[str]) -> str:
    own = [ip for ip in listed if _is_of_this_machine(ip)]
    if len(own) != 1:
        has = f"has {' and '.join(own)}" if own else "has none"
        raise ConfigError(f"HOST_IP must say which of POD_IPS, {','.join(listed)}, this machine is: it {has} of them")
    return own[0]


def _is_of_this_machine(ip: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as sock:
            sock.bind((ip, 0))
    except OSError:
        return False
    return True
