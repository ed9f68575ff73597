"""Rank tables: the JSON files that list the instances of a deployment with prefill and decode on separate instances.

The global table has three groups: the scheduler, the prefill instances and the decode instances. A local table has one
instance, which is an entry of the global table. The module opens no connections.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

GROUPS = ("scheduler", "prefill", "decode")  # roles in the order of the group ids 0, 1 and 2
GLOBAL, LOCAL, PORTS = "GLOBAL_RANK_TABLE_FILE_PATH", "RANK_TABLE_FILE_PATH", "NODE_PORTS"
HEAD = {"version": "1.0", "status": "completed"}
SPELLINGS = ("local_ranktable_", "local_rank_table_")  # files are written with the first one


@dataclass(frozen=True)
class Instance:
    """One entry of a rank table."""

    role: str
    entry: dict[str, Any]

    @property
    def host(self) -> str:
        return str(self.entry["server_ip"])

    @property
    def device_ids(self) -> tuple[str, ...]:
        return tuple(device["device_id"] for device in self.entry.get("device", ()))

    def __str__(self) -> str:
        devices = f", devices {','.join(self.device_ids)}" if self.device_ids else ""
        return f"{self.role} instance {self.host}{devices}"


def global_table(instances: list[Instance]) -> dict[str, Any]:
    """Return the global table of `instances`, which keep their order within each group."""
    entries = [[each.entry for each in instances if each.role == role] for role in GROUPS]
    groups = [_group(str(i), servers) for i, servers in enumerate(entries)]
    return {**HEAD, "server_group_list": groups}


def local_table(instance: Instance) -> dict[str, Any]:
    """Return the local table of an instance, whose group id is always 0."""
    return {**HEAD, **_group("0", [instance.entry])}


def _group(group_id: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {"group_id": group_id, "server_count": str(len(entries)), "server_list": entries}


def read_global(name: str, path: str) -> list[Instance]:
    """Return the instances of the global table at `path`: scheduler, prefill, decode. Raises ConfigError that begins
    with `name` for a table that is malformed or lists a device twice."""
    groups = _read(name, path).get("server_group_list")
    if not isinstance(groups, list) or len(groups) != len(GROUPS):
        raise ConfigError(f"{name}: {path} must have a `server_group_list` of {len(GROUPS)} groups")
    instances = []
    for i, (role, group) in enumerate(zip(GROUPS, groups, strict=True)):
        if not isinstance(group, dict) or group.get("group_id") != str(i):
            raise ConfigError(f'{name}: {path} must have the group_id "{i}" in group {i}, the {role} group')
        instances += [Instance(role, entry) for entry in _entries(f"{name}: {path}, {role} group", group, role)]
    check_instances(f"{name}: {path}", instances)
    return instances


def check_instances(where: str, instances: list[Instance]) -> None:
    """Raise ConfigError if there are two schedulers, or a device belongs to two instances."""
    schedulers = [each for each in instances if each.role == GROUPS[0]]
    if len(schedulers) > 1:
        hosts = " and ".join(each.host for each in schedulers)
        raise ConfigError(f"{where} has {len(schedulers)} schedulers, {hosts}; only one may have --api-server")
    owners: dict[tuple[str, str], Instance] = {}
    for each in instances:
        for device_id in each.device_ids:
            if other := owners.get((each.host, device_id)):
                raise ConfigError(f"{where} has device {device_id} of {each.host} twice: {other}; {each}")
            owners[each.host, device_id] = each


def own_instance(path: str, instances: list[Instance]) -> int:
    """Return the index in `instances` of the entry in the local table at `path`. Raises ConfigError."""
    for spelling, other in (SPELLINGS, SPELLINGS[::-1]):
        if spelling in Path(path).name and not Path(path).exists():
            path = str(Path(path).with_name(Path(path).name.replace(spelling, other)))
            break
    table = _read(LOCAL, path)
    role = GROUPS[1] if any("device" in each for each in table.get("server_list") or ()) else GROUPS[0]
    entries = _entries(f"{LOCAL}: {path}", table, role)
    found = [i for i, each in enumerate(instances) if entries == [each.entry]]
    if not found:
        raise ConfigError(f"{LOCAL}: {path} must have exactly one entry, which is an entry of {GLOBAL}, too")
    return found[0]


@dataclass(frozen=True)
class Deployment:
    """Instances of a global table, one of which starts now."""

    instances: list[Instance]  # scheduler, prefill, decode
    own: int  # index of the one that starts
    ports: tuple[int, ...]  # HTTP ports of prefill and decode instances, in their order

    @property
    def instance(self) -> Instance:
        return self.instances[self.own]

    def workers(self, *roles: str) -> list[tuple[Instance, int]]:
        """Return the prefill and decode instances, or those with one of the roles, with their HTTP ports."""
        workers = [each for each in self.instances if each.role != GROUPS[0]]
        return [pair for pair in zip(workers, self.ports, strict=True) if not roles or pair[0].role in roles]

    @property
    def own_port(self) -> int | None:
        """Return the HTTP port that NODE_PORTS gives to the instance that starts."""
        return next((port for each, port in self.workers() if each is self.instance), None)


def read_deployment(environ: Mapping[str, str]) -> Deployment | None:
    """Return the deployment that the variables describe, or None without rank tables. Raises ConfigError."""
    given = [name for name in (GLOBAL, LOCAL) if environ.get(name)]
    if not given:
        return None
    for name in (GLOBAL, LOCAL, PORTS):
        if not environ.get(name):
            raise ConfigError(f"{given[0]} is set, so {name} must be set as well")
    instances = read_global(GLOBAL, environ[GLOBAL])
    own = own_instance(environ[LOCAL], instances)
    port = environ.get("SERVICE_HTTP_PORT", "")
    ports = check_ports(environ[PORTS], int(port) if port.isdecimal() else None, own, instances)
    return Deployment(instances, own, ports)


def check_ports(text: str, port: int | None, own: int, instances: list[Instance]) -> tuple[int, ...]:
    """Return the ports of NODE_PORTS. `port` is the HTTP port of `instances[own]` if it is given. Raises ConfigError
    with the wrong port."""
    parts = [part.strip() for part in text.split(",")]
    workers = [each for each in instances if each.role != GROUPS[0]]
    if not all(part.isascii() and part.isdigit() and 0 < int(part) < 1 << 16 for part in parts):
        raise ConfigError(f"{PORTS} is {text!r}, it must be ports with commas between them")
    if len(parts) != len(workers):
        raise ConfigError(
            f"{PORTS} is {text!r}, it must have one port for each of {len(workers)} instances in {GLOBAL}"
        )
    used: dict[tuple[str, int], Instance] = {}
    for each, part in zip(workers, parts, strict=True):
        if other := used.get((each.host, int(part))):
            raise ConfigError(f"{PORTS} is {text!r}, which has port {part} twice on {each.host}: {other}; {each}")
        used[each.host, int(part)] = each
        if each is instances[own] and port is not None and int(part) != port:
            order = "; ".join(map(str, workers))
            problem = f"{PORTS} is {text!r}, where the {each} has port {part}, but its --port is {port}"
            raise ConfigError(f"{problem}: the order must be that of {GLOBAL} ({order})")
    if instances[own].role == GROUPS[0] and port and (other := used.get((instances[own].host, port))):
        raise ConfigError(f"{PORTS} is {text!r}, which has the scheduler's own --port {port} for the {other}")
    return tuple(map(int, parts))


def _read(name: str, path: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"{name} is {path!r}, which cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is {path!r}, which is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{name} is {path!r}, which must hold a JSON object")
    return found


def _entries(where: str, group: dict[str, Any], role: str) -> list[dict[str, Any]]:
    """Return the entries of a group. Raises ConfigError if one of them is malformed."""
    entries = group.get("server_list")
    if not isinstance(entries, list) or group.get("server_count") != str(len(entries)):
        raise ConfigError(f"{where}: `server_count` must be the number of entries in `server_list`, as a string")
    for entry in entries:
        if not isinstance(entry, dict) or not all(
            isinstance(entry.get(key), str) for key in ("server_id", "server_ip")
        ):
            raise ConfigError(f"{where}: an entry must have `server_id` and `server_ip`, both strings")
        _check_devices(f"{where}, {entry['server_ip']}", entry, role)
    return entries


def _check_devices(where: str, entry: dict[str, Any], role: str) -> None:
    devices = entry.get("device")
    if role == GROUPS[0]:
        if devices:
            raise ConfigError(f"{where}: a scheduler has no `device`")
        return
    names = ("device_id", "device_ip", "rank_id")
    if not isinstance(devices, list) or not devices:
        raise ConfigError(f"{where}: a {role} instance must have at least one `device`")
    for i, device in enumerate(devices):
        if not isinstance(device, dict) or not all(isinstance(device.get(key), str) for key in names):
            raise ConfigError(f"{where}: a device must have {', '.join(names)}, all strings")
        if device["rank_id"] != str(i):
            raise ConfigError(
                f'{where}: device {device["device_id"]} has rank_id "{device["rank_id"]}", expected "{i}"'
            )
