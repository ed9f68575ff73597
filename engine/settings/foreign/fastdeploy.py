"""Options of FastDeploy 2. Those that vLLM has as well are in vllm.py."""

from __future__ import annotations

from engine.settings.foreign import readers
from engine.settings.foreign.fastdeploy_variables import ONE_POOL
from engine.settings.foreign.row import FASTDEPLOY, OptionRow, ignored, refused, sets

ROUTER = "clients call a decode instance, which knows the prefill instances; a scheduler instance has REPLICAS"
PORT = "the engine needs no port; servers that differ in this one differ in one"
IMAGE_OUTPUT = "answers are text"
IMAGE_CACHES = "embeddings of images are kept in the engine, and blocks of prompts by the content of their images"
LOCAL = "requests wait in this server alone"
EXPERTS = "ranks have a share of every expert or, with ENABLE_EXPERT_PARALLEL=1, experts that stay there while it runs"
RELOAD = "`start_server --reload MODEL` replaces the model"
# Options of newer versions, without leading dashes
NO_EFFECT = {
    "model-impl": "there is one implementation of each family",
    "prealloc-dec-block-slot-num-threshold": ONE_POOL,
    "scheduler-max-size": "MAX_CACHED_TASK_NUM limits the requests that wait",
    **dict.fromkeys(("scheduler-ttl", "scheduler-min-load-score", "scheduler-load-shards-num"), LOCAL),
    **dict.fromkeys(("scheduler-host", "scheduler-port", "scheduler-db", "scheduler-topic"), LOCAL),
    **dict.fromkeys(("eplb-config", "chunked-moe-size"), EXPERTS),
    **dict.fromkeys(("max-encoder-cache", "max-processor-cache"), IMAGE_CACHES),
    "deploy-modality": "ENABLE_MM=0 is for text only",
    **dict.fromkeys(("scheduler-password", "scheduler-sync-period", "scheduler-expire-period"), LOCAL),
    **dict.fromkeys(("scheduler-release-load-expire-period", "scheduler-reader-parallel"), LOCAL),
    **dict.fromkeys(("scheduler-writer-parallel", "scheduler-reader-batch-size", "scheduler-writer-batch-size"), LOCAL),
    **dict.fromkeys(("pd-comm-port", "rdma-comm-ports"), "ENGINE_WORKER_QUEUE_PORT is the port for other instances"),
    "cache-transfer-protocol": "KV_TRANSFER says how blocks are transferred between instances",
    "benchmark-metrics-config": "figures of all requests are at /metrics",
    "shutdown-comm-group-if-worker-idle": "`start_server --reload MODEL` starts ranks anew",
    "write-policy": "blocks are written to the host's memory when a GPU needs their place",
}
FLAGS_WITHOUT_EFFECT = {
    **dict.fromkeys(("enable-eplb", "enable-chunked-moe", "disable-sequence-parallel-moe"), EXPERTS),
    "use-internode-ll-two-stage": EXPERTS,
    "enable-flashinfer-allreduce-fusion": "the fastest all-reduce that the devices allow is always taken",
    "enable-overlap-schedule": "the next step is always picked while one runs",
    "enable-output-caching": "blocks of answers are always kept for prompts that begin alike",
    "skip-port-check": "a port that is taken is named at start",
    "disable-chunked-mm-input": "a prompt may be divided inside an image, whose embeddings are computed once",
}
NOT_SUPPORTED = {
    "kvcache-storage-backend": "SWAP_SPACE keeps blocks in the host's memory",
    "logits-processors": "requests have the fields logit_bias, bad_words and reasoning_max_tokens",
    "override-pooler-config": "requests have the fields pooling, normalize and dimensions",
    "plas-attention-config": "attention is always exact",
    "tokenizer-base-url": "the tokenizer is the one in the model's folder",
    **dict.fromkeys(("rsync-config", "routing-replay-config"), RELOAD),
    "config": "every setting is an option and an environment variable",
}

ROWS: tuple[OptionRow, ...] = (
    sets("--metrics-port", "METRICS_HTTP_PORT", FASTDEPLOY),
    sets(
        "--engine-worker-queue-port",
        "ENGINE_WORKER_QUEUE_PORT",
        FASTDEPLOY,
        remark=f"of a prefill instance; otherwise {PORT}, which gRPC takes",
    ),
    sets("--cache-queue-port", "HEALTH_HTTP_PORT", FASTDEPLOY, remark=f"{PORT}, which the health endpoints take"),
    sets("--kv-cache-ratio", "BLOCK_RATIO", FASTDEPLOY),
    sets("--workers", "PUSH_MODE_HTTP_WORKERS", FASTDEPLOY),
    sets("--ips", "POD_IPS", FASTDEPLOY),
    sets("--log-dir", "FD_LOG_DIR", FASTDEPLOY),
    sets("--use-warmup", "USE_WARMUP", FASTDEPLOY, remark="also `--use-warmup 1`"),
    sets("--use-cudagraph", "USE_CUDAGRAPH", FASTDEPLOY, remark="on by default"),
    sets(
        "--max-waiting-time",
        "QUEUE_TIMEOUT",
        FASTDEPLOY,
        read=readers.seconds_or_no_limit,
        remark="`-1`: no limit; the time until the request begins",
    ),
    sets(
        "--max-concurrency",
        "MAX_CACHED_TASK_NUM",
        FASTDEPLOY,
        read=readers.concurrency,
        remark="less BATCH_SIZE: those that do not run wait",
    ),
    sets(
        "--graph-optimization-config",
        "CUDAGRAPH_CAPTURE_SIZES",
        FASTDEPLOY,
        read=readers.graph_optimization,
        remark="and USE_CUDAGRAPH; `graph_opt_level` and `full_cuda_graph` have no effect, `cudagraph_only_prefill` is"
        " refused",
    ),
    sets(
        "--guided-decoding-disable-any-whitespace",
        "GUIDED_DECODING_DISABLE_ANY_WHITESPACE",
        FASTDEPLOY,
    ),
    ignored("--static-decode-blocks", ONE_POOL, FASTDEPLOY),
    ignored("--enable-logprob", "requests may always ask for logprobs", FASTDEPLOY, is_flag=True),
    ignored(
        "--enable-custom-all-reduce",
        "the fastest all-reduce that the devices allow is always taken",
        FASTDEPLOY,
        is_flag=True,
    ),
    ignored("--load-choices", "a checkpoint is exported once, whatever it was written by", FASTDEPLOY),
    sets("--splitwise-role", "SPLITWISE_ROLE", FASTDEPLOY),
    sets("--innode-prefill-ports", "INNODE_PREFILL_PORTS", FASTDEPLOY),
    refused(
        "--dynamic-load-weight",
        "`start_server --reload MODEL` replaces the model of the running server",
        FASTDEPLOY,
        harmless=("0",),
    ),
    sets("--enable-mm", "ENABLE_MM", FASTDEPLOY, remark="on by default"),
    refused("--scheduler-name", LOCAL, FASTDEPLOY, harmless=("local",)),
    refused("--router", ROUTER, FASTDEPLOY),
    refused("--load-strategy", RELOAD, FASTDEPLOY, harmless=("normal",)),
    refused("--model-config-name", "the file is config.json", FASTDEPLOY, harmless=("config.json",)),
    refused("--enable-mm-output", IMAGE_OUTPUT, FASTDEPLOY, is_flag=True),
    refused("--enable-early-stop", "a request ends with its max_tokens, stop or eos", FASTDEPLOY, is_flag=True),
    refused("--early-stop-config", "a request ends with its max_tokens, stop or eos", FASTDEPLOY),
    refused("--controller-port", "the server has no control port", FASTDEPLOY, harmless=("-1",)),
    refused(
        "--local-data-parallel-id", "DATA_PARALLEL_SIZE engines are a part of one server", FASTDEPLOY, harmless=("0",)
    ),
    refused("--enable-entropy", "answers have logprobs, not entropies", FASTDEPLOY, is_flag=True),
    refused("--enable-keep-sampling-mask", "answers have logprobs, not masks", FASTDEPLOY, is_flag=True),
    refused(
        "--lm-head-fp32", "DTYPE is the type of an output projection that is not quantized", FASTDEPLOY, is_flag=True
    ),
    *(ignored(f"--{name}", why, FASTDEPLOY) for name, why in NO_EFFECT.items()),
    *(ignored(f"--{name}", why, FASTDEPLOY, is_flag=True) for name, why in FLAGS_WITHOUT_EFFECT.items()),
    *(refused(f"--{name}", instead, FASTDEPLOY) for name, instead in NOT_SUPPORTED.items()),
)
