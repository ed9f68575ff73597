"""Options and variables of the rank-table deployment of vLLM on Ascend: prefill and decode on separate instances."""

from __future__ import annotations

from collections.abc import Mapping

from engine.errors import ConfigError
from engine.settings.config import Config
from engine.settings.foreign.row import RANK_TABLE, OptionMeaning, OptionRow, ignored, refused
from engine.settings.rank_tables import GLOBAL, LOCAL, PORTS, check_ports, own_instance, read_global

ONE_SERVER = (
    "prefill and decode run in the same server; start one server, on several machines with POD_IPS and MP_NNODE"
)
TOOL = "it is an option of pd_ranktable_tools.py"


def _refuse(name: str, path: str, environ: Mapping[str, str]) -> OptionMeaning:
    """Check the tables of the environment, then refuse them. An error in the tables has a message of its own."""
    if name == LOCAL and environ.get(GLOBAL):
        return OptionMeaning()  # it is checked with the global table
    instance = ""
    if name == GLOBAL:
        instances = read_global(GLOBAL, path)
        if environ.get(LOCAL):
            own = own_instance(environ[LOCAL], instances)
            instance = f"; this is the {instances[own]}"
            if environ.get(PORTS):
                check_ports(environ[PORTS], Config.from_env(environ).service_http_port, own, instances)
    raise ConfigError(f"{name} is not supported: {ONE_SERVER}{instance}")


ROWS: tuple[OptionRow, ...] = (
    refused(GLOBAL, ONE_SERVER, RANK_TABLE, read=_refuse),
    refused(LOCAL, ONE_SERVER, RANK_TABLE, read=_refuse),
    ignored(PORTS, "only instances with rank tables read it", RANK_TABLE),
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
