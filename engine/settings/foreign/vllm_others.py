"""Options of vLLM that are used less often."""

from __future__ import annotations

from engine.settings.foreign.others import OVERRIDES
from engine.settings.foreign.row import SGLANG, VLLM, OptionRow, ignored, refused, sets

SERVERS = "DATA_PARALLEL_SIZE engines are on this machine; REPLICAS distributes requests among servers"
MACHINES = "POD_IPS has the machines, POD_0_IP the one that serves"
ONE_KERNEL = "there is one kernel for each op and device"
EXPORTED = "a checkpoint is exported once, whatever it was written by"
FIGURES = "figures of all requests are at /metrics"
IMAGES = "embeddings of images are kept in the engine, and blocks of prompts by the content of their images"
NO_CERTIFICATES = "clients have keys (API_KEY), not certificates"
WITHOUT_EFFECT = {  # reason -> options
    "every method and header of the endpoints is allowed": ("allowed-methods", "allowed-headers"),
    "log lines never have texts": ("max-log-len",),
    "the limits are fixed, see docs/operation.md#security": ("h11-max-incomplete-event-size", "h11-max-header-count"),
    "config.json and no code of a checkpoint is read": ("config-format", "code-revision"),
    EXPORTED: (
        *("safetensors-load-strategy", "model-loader-extra-config", "ignore-patterns", "pt-load-map-location"),
        "max-parallel-loading-workers",
    ),
    "blocks are found by the BLAKE2 hashes of their tokens": ("prefix-caching-hash-algo",),
    ONE_KERNEL: ("all2all-backend", "mm-encoder-attn-backend", "dbo-decode-token-threshold"),
    IMAGES: ("mm-processor-cache-gb", "mm-processor-cache-type", "mm-encoder-tp-mode"),
    "the matrices of adapters are float32 on CPUs and have the type of the activations on GPUs": ("lora-dtype",),
    FIGURES: ("show-hidden-metrics-for-version", "collect-detailed-traces"),
    "requests always have a priority, and those of one priority start in the order of their arrival": (
        "scheduling-policy",
    ),
    "CUDAGRAPH_CAPTURE_SIZES says what is captured": ("max-cudagraph-capture-size",),
    "SWAP_SPACE is a part of the engine's process": ("kv-offloading-backend",),
    "a model is always a static graph": ("optimization-level",),
    "preempted requests are computed again": ("preemption-mode",),
    "engines are processes of this server": ("data-parallel-backend",),
}
FLAGS_WITHOUT_EFFECT = {  # reason -> options without a value
    "log lines have the ids of requests, never their texts": ("enable-log-requests",),
    "API keys come in a header, not in cookies": ("allow-credentials",),
    "PUSH_MODE_HTTP_WORKERS is the number of HTTP processes": ("disable-frontend-multiprocessing",),
    "every response has the header X-Request-Id": ("enable-request-id-headers",),
    "the model does not see tools then": ("exclude-tools-when-tool-choice-none",),
    "GET /load is always served": ("enable-server-load-tracking",),
    "keys and values of an int8 cache have scales of their own": ("calculate-kv-scales",),
    ONE_KERNEL: ("disable-cascade-attn", "enable-dbo"),
    IMAGES: ("disable-mm-preprocessor-cache", "skip-mm-profiling"),
    FIGURES: ("kv-cache-metrics", "cudagraph-metrics", "aggregate-engine-logging"),
    "each rank has its share of A or B": ("fully-sharded-loras",),
    "downloads show their progress": ("use-tqdm-on-load",),
    "blocks are always taken one by one": ("use-v2-block-manager",),
}
REFUSED = {  # what to use instead -> options
    NO_CERTIFICATES: ("ssl-ca-certs",),
    "SERVICE_HOST and SERVICE_HTTP_PORT are the address": ("uds",),
    "a proxy in front of the server may change requests": ("middleware",),
    "tools are run by the client": ("tool-server",),
    "LOG_LEVEL, FD_LOG_DIR, FD_LOG_MAX_BYTES and FD_LOG_BACKUP_COUNT": ("log-config-file",),
    "config.json is in the model's folder": ("hf-config-path",),
    "other users of the machine can read a command line; set the variable HF_TOKEN": ("hf-token",),
    "requests have the fields pooling, normalize and dimensions": ("pooler-config",),
    "--tool-call-parser FILE.py describes calls; reasoning is between <think> and </think>": (
        "reasoning-parser-plugin",
    ),
    MACHINES: ("master-addr",),
    SERVERS: (
        *("data-parallel-rank", "data-parallel-start-rank", "data-parallel-size-local", "data-parallel-address"),
        "data-parallel-rpc-port",
    ),
    "processes and scheduler are a part of the server": ("worker-cls", "worker-extension-cls", "scheduler-cls"),
    "--num-gpu-blocks-override or --block-bs says how many blocks there are": ("kv-cache-memory-bytes",),
    "ENGINE_WORKER_QUEUE_PORT and REPLICA_CACHE_PORT are for other servers": ("kv-events-config", "ec-transfer-config"),
    "--guided-decoding-disable-any-whitespace and --reasoning-parser; the library is llguidance": (
        "structured-outputs-config",
    ),
    OVERRIDES: ("rope-theta",),
    "requests say how many frames or pixels they have": ("media-io-kwargs",),
    "settings are options and environment variables": ("additional-config",),
}
FLAGS_REFUSED = {  # what to use instead -> options without a value
    "a renewed certificate needs a restart": ("enable-ssl-refresh",),
    "requests have the field return_tokens_as_token_ids": ("return-tokens-as-token-ids",),
    "requests have stream_options with include_usage": ("enable-force-include-usage",),
    "POST /tokenize and /detokenize": ("enable-tokenizer-info-endpoint",),
    "log lines never have texts": ("enable-log-outputs",),
    "a proxy in front of the server may hide /docs, which needs no key": ("disable-fastapi-docs",),
    "stop_server frees the memory of the model": ("enable-sleep-mode",),
    "the model process tokenizes; prompts may be token ids": ("skip-tokenizer-init",),
    "prompts are texts or token ids": ("enable-prompt-embeds", "enable-mm-embeds"),
    "--hf-overrides '{\"sliding_window\": null}', or --max-model-len up to the window": ("disable-sliding-window",),
    MACHINES: ("headless",),
    SERVERS: ("data-parallel-hybrid-lb", "data-parallel-external-lb"),
}

ROWS: tuple[OptionRow, ...] = (
    sets("--kv-offloading-size", "SWAP_SPACE", VLLM, remark="GiB of all ranks together"),
    sets("--cudagraph-capture-sizes", "CUDAGRAPH_CAPTURE_SIZES", VLLM, aliases=("--cuda-graph-sizes",)),
    sets("--shutdown-timeout", "DRAIN_TIMEOUT", VLLM),
    sets("--master-port", "INTER_NODE_PORT", VLLM),
    sets("--language-model-only", "ENABLE_MM", VLLM, values={"1": "0", "0": "1"}, is_flag=True, remark="turned off"),
    refused("--ssl-cert-reqs", NO_CERTIFICATES, VLLM, harmless=("0",)),
    refused("--num-redundant-experts", "experts have no copies on other ranks", VLLM, harmless=("0",)),
    refused(
        "--decode-context-parallel-size", "--mp-num is what divides a model", VLLM, aliases=("-dcp",), harmless=("1",)
    ),
    refused("--tokenizer-mode", "the tokenizer is the fast one", VLLM, SGLANG, harmless=("auto", "hf")),
    refused("--tokenizer-revision", "name a folder that has the revision", VLLM, harmless=("main", "master")),
    ignored("--attention-backend", "there is one attention kernel for each device", VLLM, SGLANG),
    ignored("--stream-interval", "tokens are sent as they come", VLLM, SGLANG),
    *(ignored(f"--{name}", why, VLLM) for why, names in WITHOUT_EFFECT.items() for name in names),
    *(ignored(f"--{name}", why, VLLM, is_flag=True) for why, names in FLAGS_WITHOUT_EFFECT.items() for name in names),
    *(refused(f"--{name}", instead, VLLM) for instead, names in REFUSED.items() for name in names),
    *(refused(f"--{name}", instead, VLLM, is_flag=True) for instead, names in FLAGS_REFUSED.items() for name in names),
)
