"""Settings: which model is served, how it is exported, and what it runs on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from engine.errors import ConfigError
from engine.settings.machines import Machines, read_machines
from engine.settings.setting import expanded, json_object, setting

QUANT_TYPES = (
    *("weight_only_int8", "weight_only_int4", "weight_only_int4_g32", "a8w8", "weight_only_fp8"),
    *("a8w8_fp8", "block_wise_fp8", "a8w8_fp8_wint4", "mxfp4", "a8w8c8", "a8w8c8_fp8"),
)


@dataclass(frozen=True)
class ModelSettings:
    model_dir: str = setting(
        "/models", "MODEL_DIR", "checkpoint or exported model; with a model name, where it is kept"
    )
    model_name: str = setting("", "model_name", "model to fetch at start (the argument of `start_server`)")
    served_model_name: str = setting(
        "",
        "SERVED_MODEL_NAME",
        "name in `/v1/models`, or several with commas between them, of which answers have the first; empty: the model"
        " name, else the directory's",
    )
    graph_dir: str = setting("", "GRAPH_DIR", "exported model that is served; empty: MODEL_DIR is one", internal=True)
    export_cache_dir: str = setting(
        "~/.cache/llm-server/exported", "EXPORT_CACHE_DIR", "where checkpoints are exported to, once each"
    )
    device: str = setting(
        "auto",
        "DEVICE",
        "what runs the graph; `auto`: a GPU if torch is installed and sees one",
        choices=("auto", "cpu", "gpu"),
        synonyms={"cuda": "gpu"},  # vLLM's and SGLang's name
    )
    load_format: str = setting(
        "auto",
        "LOAD_FORMAT",
        "`dummy`: export from config.json alone, with random weights",
        choices=("auto", "dummy"),
        synonyms=dict.fromkeys(("safetensors", "hf"), "auto"),  # vLLM's names
    )
    dtype: str = setting(
        "auto",
        "DTYPE",
        "weights of an export; `auto`: float32 stays, 16-bit becomes bfloat16; float16 is for GPUs",
        choices=("auto", "float32", "bfloat16", "float16"),
        synonyms={"half": "float16", "float": "float32"},  # vLLM's names
    )
    quant_type: str = setting(
        "none",
        "QUANT_TYPE",
        "matrices of an export with fewer bits (docs/ops.md); a model name's third part says it, too;"
        " names with `c8` also ask for USE_CACHE_KV_INT8=1",
        choices=("none", *QUANT_TYPES),
    )
    hf_overrides: str = setting(
        "", "HF_OVERRIDES", "JSON object of what an export shall find in config.json instead of what is there"
    )
    block_size: int = setting(64, "BLOCK_SIZE", "tokens of a KV block, decided at export", minimum=8, maximum=1024)
    mp_num: int = setting(
        1,
        "MP_NUM",
        "tensor-parallel ranks of the model on all machines, a process and with DEVICE=gpu a GPU each",
        minimum=1,
        maximum=64,
    )
    enable_expert_parallel: bool = setting(
        False,
        "ENABLE_EXPERT_PARALLEL",
        "each rank has [some of the experts](operation.md#expert-parallelism), not a share of every one",
    )
    data_parallel_size: int = setting(
        1,
        "DATA_PARALLEL_SIZE",
        "engines that serve the model on this machine, each with MP_NUM ranks; requests are"
        " [distributed](operation.md#several-engines) among them",
        minimum=1,
        maximum=64,
    )
    engine_index: int = setting(0, "ENGINE_INDEX", "which of them a process is", minimum=0, internal=True)
    engine_is_back: bool = setting(False, "ENGINE_IS_BACK", "it has served before and has ended", internal=True)
    mp_nnode: int = setting(
        1, "MP_NNODE", "machines that hold the model together; MP_NUM / MP_NNODE ranks each", minimum=1, maximum=16
    )
    pod_ips: str = setting("", "POD_IPS", "with several machines: their addresses, `10.0.0.1,10.0.0.2`")
    pod_0_ip: str = setting("", "POD_0_IP", "the one of POD_IPS that serves; empty: the first")
    host_ip: str = setting("", "HOST_IP", "the one of POD_IPS that this machine is; empty: the one that it has")
    use_cache_kv_int8: bool = setting(False, "USE_CACHE_KV_INT8", "KV cache of an export with 8 bits a number")

    @cached_property
    def machines(self) -> Machines:
        texts = {"POD_IPS": self.pod_ips, "POD_0_IP": self.pod_0_ip, "HOST_IP": self.host_ip}
        return read_machines(self.mp_nnode, self.mp_num, texts)

    def check_engines(self) -> None:
        if self.data_parallel_size > 1 and self.mp_nnode > 1:
            raise ConfigError(
                f"DATA_PARALLEL_SIZE is {self.data_parallel_size} and MP_NNODE {self.mp_nnode}: a model on several"
                " machines is served by one engine; REPLICAS distributes requests among several servers"
            )

    @property
    def graph_path(self) -> Path:
        return Path(self.graph_dir or self.model_dir)

    def check_overrides(self) -> None:
        try:
            json_object(self.hf_overrides)
        except ValueError as error:
            raise ConfigError(f"HF_OVERRIDES is {self.hf_overrides!r}, it must be a JSON object: {error}") from None

    def check_model_paths(self) -> None:
        for env, text in (("MODEL_DIR", self.model_dir), ("EXPORT_CACHE_DIR", self.export_cache_dir)):
            expanded(env, text)
