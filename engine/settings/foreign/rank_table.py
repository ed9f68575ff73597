"""Options and variables of the rank-table deployment of vLLM on Ascend: prefill and decode on separate instances."""

from __future__ import annotations

from collections.abc import Mapping

from engine.address import in_url
from engine.errors import ConfigError
from engine.settings.disaggregation import DECODE, PORT_OFFSETS, PREFILL, SCHEDULER
from engine.settings.foreign.row import RANK_TABLE, OptionRow, ignored, refused
from engine.settings.rank_tables import GLOBAL, LOCAL, PORTS, Deployment, read_deployment

TOOL = "it is an option of pd_ranktable_tools.py"
OPEN_PORTS = {PREFILL: "engine_worker_queue_port", DECODE: "service_grpc_port"}  # other instances connect to these


def settings_of_tables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that follow from the rank tables in the environment; none without tables. Raises
    ConfigError."""
    deployment = read_deployment(environ)
    if deployment is None:
        return {}
    role = deployment.instance.role
    found = {"SPLITWISE_ROLE": role}
    if deployment.own_port:
        found["SERVICE_HTTP_PORT"] = str(deployment.own_port)
        name = OPEN_PORTS[role]
        found[name.upper()] = str(deployment.own_port + PORT_OFFSETS[name])
    if role == DECODE:
        found["PREFILL_INSTANCES"] = _addresses(deployment, PREFILL)
    if role in (DECODE, SCHEDULER):
        found["REPLICAS"] = _addresses(deployment, DECODE)
    if devices := deployment.instance.device_ids:
        found["MP_NUM"] = str(len(devices))
    for name, value in found.items():
        if environ.get(name, value) != value:
            raise ConfigError(f"{name} is {environ[name]}, the rank tables give the {deployment.instance} {value}")
    if deployment.instance.device_ids:
        found["CUDA_VISIBLE_DEVICES"] = environ.get("CUDA_VISIBLE_DEVICES") or ",".join(deployment.instance.device_ids)
    return found


def _addresses(deployment: Deployment, role: str) -> str:
    """Return the addresses of all instances with this role. Raises ConfigError if there is none."""
    found = [f"{in_url(each.host)}:{port + PORT_OFFSETS[OPEN_PORTS[role]]}" for each, port in deployment.workers(role)]
    if not found:
        raise ConfigError(f"{GLOBAL} has no {role} instance")
    return ",".join(found)


ROWS: tuple[OptionRow, ...] = (
    OptionRow(
        GLOBAL,
        (RANK_TABLE,),
        remark="the same; SPLITWISE_ROLE, MP_NUM and the addresses of the other instances follow from the tables",
    ),
    OptionRow(LOCAL, (RANK_TABLE,), remark="the same; both spellings of the file's name are read"),
    OptionRow(PORTS, (RANK_TABLE,), remark="the same, for every instance"),
    ignored("USE_OPENAI", "OpenAI's API and vLLM's /generate are both served", RANK_TABLE),
    ignored("LLM_TOOLS_PATH", "the tools are on the PATH", RANK_TABLE),
    refused(
        "ASCEND_RT_VISIBLE_DEVICES", "Ascend devices are not supported; CUDA_VISIBLE_DEVICES chooses GPUs", RANK_TABLE
    ),
    *(
        refused(f"--{name}", TOOL, RANK_TABLE)
        for name in ("prefill-server-list", "decode-server-list", "global-ranktable-list", "save-dir", "mode")
    ),
    refused("--api-server", TOOL, RANK_TABLE, is_flag=True),
)
