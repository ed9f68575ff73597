"""Options and variables of the rank-table deployment of vLLM on Ascend: prefill and decode on separate instances."""

from __future__ import annotations

from engine.settings.foreign.row import RANK_TABLE, OptionRow, ignored, refused

ONE_SERVER = (
    "prefill and decode run in the same server; start one server, on several machines with POD_IPS and MP_NNODE"
)

ROWS: tuple[OptionRow, ...] = (
    refused("GLOBAL_RANK_TABLE_FILE_PATH", ONE_SERVER, RANK_TABLE),
    refused("RANK_TABLE_FILE_PATH", ONE_SERVER, RANK_TABLE),
    ignored("NODE_PORTS", "only the scheduler of separate instances would read it", RANK_TABLE),
    ignored("USE_OPENAI", "OpenAI's API and the native one are both served", RANK_TABLE),
    ignored("LLM_TOOLS_PATH", "no tools of that deployment are used", RANK_TABLE),
    refused("--prefill-server-list", ONE_SERVER, RANK_TABLE),
    refused("--decode-server-list", ONE_SERVER, RANK_TABLE),
    refused("--global-ranktable-list", ONE_SERVER, RANK_TABLE),
    refused("--save-dir", ONE_SERVER, RANK_TABLE),
    refused("--api-server", ONE_SERVER, RANK_TABLE, is_flag=True),
    refused("--mode", ONE_SERVER, RANK_TABLE),
)
