"""Write the rank tables of a deployment with prefill and decode on separate instances.

`gen` writes the tables of this machine: global_ranktable_IP.json, and one local table for each instance. `merge` writes
global_ranktable_merge.json from the global tables of several machines. Exit status: 0, or 2 with the reason.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import socket
import struct
import sys
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.settings.rank_tables import (
    GROUPS,
    SPELLINGS,
    Instance,
    check_instances,
    global_table,
    local_table,
    read_global,
)

RDMA_DEVICES = Path("/sys/class/infiniband")  # each has its network interfaces in device/net
SIOCGIFADDR = 0x8915
ELSEWHERE = ("192.0.2.1", 9)  # an address for documentation: the socket is not used to send anything


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    given = parse_arguments(arguments)
    try:
        files = generate(given) if given.mode == "gen" else merge(given.global_ranktable_list)
        given.save_dir.mkdir(parents=True, exist_ok=True)
        for name, table in files.items():
            (given.save_dir / name).write_text(json.dumps(table, indent=4) + "\n", encoding="utf-8")
            print(given.save_dir / name)
    except ConfigError as error:
        print(f"pd_ranktable_tools.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"pd_ranktable_tools.py: --save-dir: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def generate(given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the tables of this machine by the names of their files."""
    host = host_address()
    device_ip = rdma_address() or host
    instances = [Instance(GROUPS[0], _server(host))] if given.api_server else []
    for role, lists in ((GROUPS[1], given.prefill_server_list), (GROUPS[2], given.decode_server_list)):
        for text in lists:
            devices = [
                {"device_id": device_id, "device_ip": device_ip, "rank_id": str(rank)}
                for rank, device_id in enumerate(_device_ids(role, text))
            ]
            instances.append(Instance(role, {**_server(host), "device": devices}))
    if not instances:
        raise ConfigError("--mode gen needs --prefill-server-list, --decode-server-list or --api-server")
    check_instances("the machine", instances)
    files = {f"global_ranktable_{host}.json": global_table(instances)}
    for each in instances:
        part = "".join(each.device_ids) or "host"
        if (name := f"{SPELLINGS[0]}{host}_{part}.json") in files:
            raise ConfigError(f"two instances have the file {name}; list their devices in another order")
        files[name] = local_table(each)
    return files


def merge(paths: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the merged global table by the name of its file. Instances keep the order of `paths`."""
    if not paths:
        raise ConfigError("--mode merge needs --global-ranktable-list")
    instances = [each for path in paths for each in read_global("--global-ranktable-list", path)]
    check_instances("the merged table", instances)
    if not any(each.role == GROUPS[0] for each in instances):
        raise ConfigError("the merged table has no scheduler; give --api-server to --mode gen on one machine")
    return {"global_ranktable_merge.json": global_table(instances)}


def host_address() -> str:
    """Return HOST_IP, or the address from which this machine reaches others."""
    if given := os.environ.get("HOST_IP"):
        try:
            return str(ip_address(given))
        except ValueError:
            raise ConfigError(f"HOST_IP is {given!r}, it must be an IP address") from None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(ELSEWHERE)
        except OSError:
            return "127.0.0.1"
        return str(sock.getsockname()[0])


def rdma_address() -> str:
    """Return the IPv4 address of the first RDMA network interface that has one, or an empty string."""
    for interface in sorted(RDMA_DEVICES.glob("*/device/net/*")):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            try:
                found = fcntl.ioctl(sock, SIOCGIFADDR, struct.pack("256s", interface.name.encode()[:15]))
            except OSError:  # it has no address
                continue
        return socket.inet_ntoa(found[20:24])
    return ""


def _server(host: str) -> dict[str, Any]:
    return {"server_id": host, "server_ip": host}


def _device_ids(role: str, text: str) -> list[str]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        problem = f"--{role}-server-list has {text!r}, it must be device ids with commas between them"
        raise ConfigError(f"{problem}; instances are separated by spaces")
    return parts


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    description = str(__doc__)
    parser = argparse.ArgumentParser("pd_ranktable_tools.py", description=description, allow_abbrev=False)
    lists: dict[str, Any] = {"nargs": "+", "default": [], "metavar": "IDS"}
    parser.add_argument("--mode", choices=("gen", "merge"), required=True, help="what is written")
    parser.add_argument("--save-dir", type=Path, default=Path(), help="folder of the files; default: this one")
    parser.add_argument("--api-server", action="store_true", help="gen: the scheduler runs on this machine")
    parser.add_argument("--prefill-server-list", **lists, help="gen: devices of each prefill instance, as 0,1 2,3")
    parser.add_argument("--decode-server-list", **lists, help="gen: devices of each decode instance")
    parser.add_argument("--global-ranktable-list", nargs="+", default=[], metavar="FILE", help="merge: global tables")
    given = parser.parse_args(arguments)
    of_gen = given.api_server or given.prefill_server_list or given.decode_server_list
    if of_gen if given.mode == "merge" else given.global_ranktable_list:
        parser.error(f"--mode {given.mode} does not take options of the other mode")
    return given


if __name__ == "__main__":
    sys.exit(main())
