"""Options of SGLang that vLLM does not have."""

from __future__ import annotations

from engine.settings.foreign.row import SGLANG, OptionRow, ignored, refused, sets

SWAP = "--swap-space GIB keeps blocks in the host's memory, GiB of all ranks together"
CAPTURED = "CUDAGRAPH_CAPTURE_SIZES says what is captured"
INVERSE = {"1": "0", "0": "1"}
WITHOUT_EFFECT = {  # reason -> options
    "MAX_NUM_BATCHED_TOKENS limits a step": ("max-prefill-tokens",),
    "requests start in the order of their arrival, with priorities and fair shares of API keys": ("schedule-policy",),
    "BLOCK_RATIO is the share of the blocks that prompts may take at admission": ("schedule-conservativeness",),
    "structured output is always enforced, by llguidance": ("grammar-backend",),
    "there is one kernel for each op and device": (
        *("sampling-backend", "moe-runner-backend", "moe-a2a-backend", "prefill-attention-backend"),
        *("decode-attention-backend", "mm-attention-backend", "lora-backend"),
    ),
    "a draft is one sequence of at most SPECULATE_MAX_DRAFT_TOKEN_NUM tokens": (
        "speculative-num-steps",
        "speculative-eagle-topk",
    ),
    "each machine finds its own address in POD_IPS": ("node-rank",),
    "MAX_LORAS is the number of adapters in memory": ("max-loaded-loras",),
    "KV_TRANSFER says how blocks are transferred between instances": ("disaggregation-transfer-backend",),
    "ENGINE_WORKER_QUEUE_PORT is the port for other instances": ("disaggregation-bootstrap-port",),
    "log lines have the ids of requests, never their texts": ("log-requests-level",),
    "figures are at /metrics, not in the log": ("decode-log-interval",),
    "LOG_LEVEL is the severity of all processes": ("log-level-http",),
    CAPTURED: ("cuda-graph-max-bs",),
    "a model is always a static graph": ("torch-compile-max-bs",),
}
FLAGS_WITHOUT_EFFECT = {  # reason -> options without a value
    "log lines have the ids of requests, never their texts": ("log-requests",),
    "metrics are always served, on METRICS_HTTP_PORT": ("enable-metrics",),
    "answers always have them": ("enable-cache-report",),
    "requests may always have a priority": ("enable-priority-scheduling",),
    "/v1/embeddings is always served": ("is-embedding",),
    "the next step is always picked while one runs": ("disable-overlap-schedule",),
    "prompts are always computed in chunks beside decodes": ("enable-mixed-chunk",),
    "start_server always sends a real request": ("skip-server-warmup",),
    "a model is always a static graph": ("enable-torch-compile",),
    "OTEL_EXPORTER_OTLP_ENDPOINT says where traces go": ("enable-trace",),
}

ROWS: tuple[OptionRow, ...] = (
    sets("--context-length", "MAX_MODEL_LEN", SGLANG),
    sets("--tp-size", "MP_NUM", SGLANG, aliases=("--tp",)),
    sets("--dp-size", "DATA_PARALLEL_SIZE", SGLANG, aliases=("--dp",), remark="engines on this machine"),
    sets("--mem-fraction-static", "GPU_MEMORY_UTILIZATION", SGLANG, remark="the memory of steps is a part of it"),
    sets("--max-running-requests", "BATCH_SIZE", SGLANG),
    sets("--max-queued-requests", "MAX_CACHED_TASK_NUM", SGLANG),
    sets(
        "--chunked-prefill-size",
        "MAX_NUM_BATCHED_TOKENS",
        SGLANG,
        refused={"-1": "long prompts are always computed in chunks, which can be as large as the longest prompt"},
        remark="tokens of a step, decodes included; `-1` is refused",
    ),
    sets("--page-size", "BLOCK_SIZE", SGLANG),
    sets("--watchdog-timeout", "CHECK_HEALTH_INTERVAL", SGLANG),
    sets("--max-loras-per-batch", "MAX_LORAS", SGLANG),
    sets("--lora-paths", "LORA_MODULES", SGLANG, remark="`name=path`, one or several"),
    sets("--cuda-graph-bs", "CUDAGRAPH_CAPTURE_SIZES", SGLANG),
    sets("--json-model-override-args", "HF_OVERRIDES", SGLANG),
    sets("--enable-multimodal", "ENABLE_MM", SGLANG, is_flag=True, remark="on by default"),
    sets("--enable-deterministic-inference", "BATCH_INVARIANT", SGLANG, is_flag=True),
    sets("--disable-radix-cache", "ENABLE_PREFIX_CACHING", SGLANG, values=INVERSE, is_flag=True, remark="turned off"),
    sets("--disable-cuda-graph", "USE_CUDAGRAPH", SGLANG, values=INVERSE, is_flag=True, remark="turned off"),
    sets("--sampling-defaults", "GENERATION_CONFIG", SGLANG, values={"model": "auto", "openai": "none"}),
    sets("--disaggregation-mode", "SPLITWISE_ROLE", SGLANG, values={"null": "mixed"}),
    sets("--speculative-draft-model-path", "SPECULATE_MODEL_PATH", SGLANG),
    sets("--speculative-num-draft-tokens", "SPECULATE_MAX_DRAFT_TOKEN_NUM", SGLANG),
    sets(
        "--speculative-algorithm",
        "SPECULATE_METHOD",
        SGLANG,
        values={"EAGLE3": "eagle3", "NEXTN": "mtp", "STANDALONE": "draft", "NGRAM": "ngram"},
        refused={"EAGLE": "EAGLE3 is an EAGLE-3 head, NEXTN the layer of the checkpoint that was made to draft"},
        remark="`EAGLE3`, `NEXTN` (`mtp`), `STANDALONE` (`draft`) or `NGRAM`",
    ),
    *(ignored(f"--{name}", why, SGLANG) for why, names in WITHOUT_EFFECT.items() for name in names),
    *(ignored(f"--{name}", why, SGLANG, is_flag=True) for why, names in FLAGS_WITHOUT_EFFECT.items() for name in names),
    refused("--pp-size", "layers are divided over ranks, --mp-num", SGLANG, harmless=("1",)),
    refused(
        "--ep-size",
        "--enable-expert-parallel divides experts among the MP_NUM ranks",
        SGLANG,
        aliases=("--ep", "--expert-parallel-size"),
        harmless=("1",),
    ),
    refused("--random-seed", "a request has a seed of its own, the field `seed`", SGLANG),
    refused("--dist-init-addr", "POD_IPS has the machines, POD_0_IP the one that serves", SGLANG),
    refused("--base-gpu-id", "CUDA_VISIBLE_DEVICES chooses GPUs", SGLANG),
    refused("--tokenizer-path", "the tokenizer is the one in the model's folder", SGLANG),
    refused("--preferred-sampling-params", "edit generation_config.json of the model", SGLANG),
    refused("--allow-auto-truncate", "requests have the field truncate_prompt_tokens", SGLANG, is_flag=True),
    refused("--enable-dp-attention", "DATA_PARALLEL_SIZE engines have all layers each", SGLANG, is_flag=True),
    refused("--enable-hierarchical-cache", SWAP, SGLANG, is_flag=True),
    *(refused(f"--hicache-{name}", SWAP, SGLANG) for name in ("ratio", "size")),
    refused("--fastapi-root-path", "a proxy in front of the server may add a path", SGLANG),
)
