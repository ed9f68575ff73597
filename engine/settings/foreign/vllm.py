"""Options and variables of vLLM, among them those that FastDeploy and the rank-table deployment have as well."""

from __future__ import annotations

from engine.settings.foreign import readers
from engine.settings.foreign.row import FASTDEPLOY, RANK_TABLE, SGLANG, VLLM, OptionRow, ignored, refused, sets

ALL = (FASTDEPLOY, VLLM, RANK_TABLE)
BOTH = (FASTDEPLOY, VLLM)
OF_CHECKPOINT = "config.json of the checkpoint says how it is quantized"
FROM_CHECKPOINT = (
    *("awq", "gptq", "awq_marlin", "gptq_marlin", "compressed-tensors", "fbgemm_fp8"),
    *("modelopt", "modelopt_fp4", "nvfp4", "mxfp4", "gguf"),
)
WEIGHTS = {"wint8": "weight_only_int8", "wint4": "weight_only_int4"}
FP8 = {"fp8": "weight_only_fp8"}
PLAIN = "of the checkpoint with unquantized weights"
FP8_PRODUCTS = f"a8w8_fp8 has 8-bit floats for weights and activations, and is made {PLAIN}"
QUANTIZE = (
    "supported are wint8, wint4, block_wise_fp8, a8w8, a8w8_fp8, a8w8_fp8_wint4, and checkpoints in AWQ, GPTQ,"
    " compressed-tensors, fp8, ModelOpt or GGUF"
)
UNSUPPORTED = {
    "smoothquant": f"a8w8 has 8 bits a weight and an activation, and is made {PLAIN}",
    "wint2": "it is a convolution code of 2 bits whose weights take 64 values, and no kernel here computes with them;"
    f" wint4 is the smallest, and is made {PLAIN}",
    **dict.fromkeys(("w4a8", "w4afp8"), f"activations are not quantized beside 4-bit weights; wint4 is made {PLAIN}"),
    **dict.fromkeys(("tensor_wise_fp8", "wfp8afp8"), FP8_PRODUCTS),
    "mix_quant": f"a8w8_fp8_wint4 has 4 bits for experts and 8-bit floats for the rest, and is made {PLAIN}",
    **dict.fromkeys(("bitsandbytes", "squeezellm", "aqlm"), QUANTIZE),
}
SECRET = "other users of the machine can read a command line; set the variable {}"

ROWS: tuple[OptionRow, ...] = (
    sets("--port", "SERVICE_HTTP_PORT", *ALL, SGLANG, remark="9965 by default"),
    sets("--host", "SERVICE_HOST", *ALL, SGLANG),
    sets(
        "--model",
        "model_name",
        *(*ALL, SGLANG),
        aliases=("--model-path",),
        remark="a folder or a name; or the argument of `start_server`",
    ),
    sets(
        "--served-model-name",
        "SERVED_MODEL_NAME",
        *ALL,
        SGLANG,
        remark="also `name other-name` after the model, or `name,other-name`; requests may have any other",
    ),
    sets("--tensor-parallel-size", "MP_NUM", *ALL, SGLANG, aliases=("-tp",)),
    sets(
        "--data-parallel-size",
        "DATA_PARALLEL_SIZE",
        *(*BOTH, SGLANG),
        aliases=("-dp",),
        remark="engines on this machine; REPLICAS distributes requests among machines",
    ),
    sets(
        "--max-model-len",
        "MAX_MODEL_LEN",
        *ALL,
        remark="also `8k`, `8K` or `auto`, which is the model's length whether or not it fits in memory;"
        " MAX_SEQ_LEN and MAX_DEC_LEN limit prompt and answer one by one",
    ),
    sets("--max-num-seqs", "BATCH_SIZE", *ALL),
    sets("--max-num-batched-tokens", "MAX_NUM_BATCHED_TOKENS", *ALL, remark="256 on the CPU, 8192 on a GPU by default"),
    sets(
        "--quantization",
        "QUANT_TYPE",
        *(*ALL, SGLANG),
        aliases=("-q",),
        values={**WEIGHTS, **FP8},
        harmless=FROM_CHECKPOINT,
        why=OF_CHECKPOINT,
        refused=UNSUPPORTED,
        remark="of an unquantized checkpoint: `wint8`, `wint4`, `fp8` or a value of QUANT_TYPE (`block_wise_fp8`);"
        " `awq`, `gptq`, `compressed-tensors`, `modelopt`, `mxfp4` and `gguf` are read from the checkpoint; `wint2`,"
        " `w4a8`, `w4afp8`, `wfp8afp8`, `tensor_wise_fp8`, `mix_quant` and `smoothquant` are refused",
    ),
    sets("--dtype", "DTYPE", VLLM, SGLANG),
    sets("--gpu-memory-utilization", "GPU_MEMORY_UTILIZATION", *BOTH),
    sets("--num-gpu-blocks-override", "NUM_GPU_BLOCKS_OVERRIDE", *BOTH),
    sets("--block-size", "BLOCK_SIZE", *BOTH),
    sets("--swap-space", "SWAP_SPACE", *BOTH, remark="0 by default; GiB of all ranks together"),
    sets("--enable-prefix-caching", "ENABLE_PREFIX_CACHING", *BOTH, remark="on by default"),
    sets("--reasoning-parser", "REASONING_PARSER", *BOTH, SGLANG),
    sets("--tool-call-parser", "TOOL_CALL_PARSER", *BOTH, SGLANG),
    sets(
        "--generation-config", "GENERATION_CONFIG", VLLM, remark="`auto` (the default), or `vllm` for OpenAI's defaults"
    ),
    sets("--load-format", "LOAD_FORMAT", VLLM, SGLANG),
    sets("--hf-overrides", "HF_OVERRIDES", VLLM),
    sets("--nnodes", "MP_NNODE", VLLM, SGLANG),
    sets("--ssl-certfile", "TLS_CERT_FILE", VLLM, SGLANG),
    sets("--ssl-keyfile", "TLS_KEY_FILE", VLLM, SGLANG),
    sets("--allowed-origins", "CORS_ALLOW_ORIGIN", VLLM, remark="one origin, not a list"),
    sets("--lora-modules", "LORA_MODULES", VLLM, remark="`name=path`, one or several, or JSON"),
    sets("--max-loras", "MAX_LORAS", VLLM),
    sets("--max-lora-rank", "MAX_LORA_RANK", VLLM, SGLANG),
    sets("--api-server-count", "PUSH_MODE_HTTP_WORKERS", VLLM, aliases=("-asc",)),
    sets("--enforce-eager", "USE_CUDAGRAPH", VLLM, values={"1": "0", "0": "1"}, is_flag=True, remark="turned off"),
    sets(
        "--kv-cache-dtype",
        "USE_CACHE_KV_INT8",
        *(VLLM, SGLANG),
        values={"auto": "0", "int8": "1"},
        refused=dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2"), "int8 stores keys and values in 8 bits"),
    ),
    sets("--max-num-partial-prefills", "MAX_NUM_PARTIAL_PREFILLS", *BOTH, remark="no limit by default (theirs: 1)"),
    sets("--max-long-partial-prefills", "MAX_LONG_PARTIAL_PREFILLS", *BOTH),
    sets("--long-prefill-token-threshold", "LONG_PREFILL_TOKEN_THRESHOLD", *BOTH),
    sets(
        "--speculative-config",
        "SPECULATE_METHOD",
        *BOTH,
        read=readers.speculation,
        remark="and SPECULATE_MAX_DRAFT_TOKEN_NUM, SPECULATE_MAX_NGRAM_SIZE, SPECULATE_MODEL_PATH; the method must be"
        " `ngram`, `suffix`, `mtp` (also as vLLM's `deepseek_mtp`), `eagle3` or `draft_model`",
    ),
    sets(
        "--compilation-config",
        "CUDAGRAPH_CAPTURE_SIZES",
        VLLM,
        aliases=("-O",),
        read=readers.compilation,
        remark="of its keys only `cudagraph_capture_sizes`",
    ),
    refused(
        "--enable-chunked-prefill",
        "long prompts are always computed in chunks; MAX_NUM_BATCHED_TOKENS can be as large as the longest prompt",
        *BOTH,
        is_flag=True,
        harmless=("1",),
        why="long prompts are always computed in chunks; MAX_NUM_BATCHED_TOKENS is the size of a step",
    ),
    ignored(
        "--guided-decoding-backend",
        "structured output is always enforced, by llguidance",
        *BOTH,
        aliases=("--structured-outputs-config.backend",),
    ),
    ignored("--trust-remote-code", "no code of a checkpoint is ever run", VLLM, SGLANG, is_flag=True),
    ignored(
        "--enable-auto-tool-choice",
        "calls of tools are always read; --tool-call-parser says in which format",
        VLLM,
        is_flag=True,
    ),
    ignored("--enable-lora", "--lora-modules and --lora-dir say where adapters are", VLLM, SGLANG, is_flag=True),
    ignored("--disable-log-requests", "log lines have the ids of requests, never their texts", VLLM, is_flag=True),
    ignored("--disable-log-stats", "figures are at /metrics, not in the log", VLLM, is_flag=True),
    ignored("--distributed-executor-backend", "every rank is a process of this server", VLLM),
    sets("--enable-expert-parallel", "ENABLE_EXPERT_PARALLEL", *BOTH),
    refused(
        "--pipeline-parallel-size", "layers are divided over ranks, --mp-num", VLLM, aliases=("-pp",), harmless=("1",)
    ),
    refused("--tokenizer", "the tokenizer is the one in the model's folder", *BOTH),
    refused("--chat-template", "the chat template is the one in the model's folder", *BOTH, SGLANG),
    refused("--revision", "name a folder that has the revision", *BOTH, SGLANG, harmless=("main", "master")),
    refused("--max-cpu-loras", "--max-loras is how many adapters are in memory", VLLM),
    sets("--limit-mm-per-prompt", "LIMIT_MM_PER_PROMPT", *BOTH, remark="16 images by default; videos are refused"),
    sets(
        "--mm-processor-kwargs",
        "MM_PROCESSOR_KWARGS",
        *BOTH,
        remark="`min_pixels` and `max_pixels`, also with `image_` in front; other keys have no effect",
    ),
    sets("--allowed-media-domains", "ALLOWED_MEDIA_DOMAINS", VLLM, remark="empty by default: no downloads; `*`: all"),
    refused("--allowed-local-media-path", "images come in data URLs; files of the server are not read", VLLM),
    refused("--seed", "a request has a seed of its own, the field `seed`", VLLM, harmless=("0",)),
    refused("--api-key", SECRET.format("API_KEY, or --api-keys FILE"), VLLM, SGLANG),
    refused("--otel-exporter-otlp-headers", SECRET.format("OTEL_EXPORTER_OTLP_HEADERS"), VLLM),
    refused("--otlp-traces-endpoint", "--otel-exporter-otlp-endpoint", VLLM),
    sets("--download-dir", "MODEL_DIR", VLLM, SGLANG),
    sets("--timeout-graceful-shutdown", "DRAIN_TIMEOUT", *BOTH),
    sets(
        "--uvicorn-log-level",
        "LOG_LEVEL",
        VLLM,
        values={"debug": "DEBUG", "trace": "DEBUG", "info": "INFO", "warning": "WARNING", "error": "ERROR"},
        refused={"critical": "the levels are debug, info, warning and error"},
    ),
    ignored("--disable-uvicorn-access-log", "LOG_LEVEL=WARNING leaves requests out", VLLM, is_flag=True),
    ignored("--disable-custom-all-reduce", "the all-reduce that is taken is the fastest", *BOTH, SGLANG, is_flag=True),
    ignored("--max-logprobs", "a request may ask for 20 logprobs", *BOTH),
    ignored("--async-scheduling", "the next step is always picked while one runs", VLLM, is_flag=True),
    ignored("--max-seq-len-to-capture", "CUDAGRAPH_CAPTURE_SIZES says what is captured", VLLM),
    ignored("--num-scheduler-steps", "the next step is always picked while one runs", VLLM),
    ignored("--chat-template-content-format", "content may be a text or a list of parts", VLLM),
    ignored("--enable-reasoning", "--reasoning-parser says so", VLLM, is_flag=True),
    ignored("--enable-prompt-tokens-details", "answers always have them", VLLM, is_flag=True),
    refused("--kv-transfer-config", "prefill and decode run in the same server; leave the option out", VLLM),
    refused(
        "--cpu-offload-gb", "EXPERTS_ON_HOST leaves experts in the host's memory, other weights are in the GPU's", VLLM
    ),
    refused("--override-generation-config", "edit generation_config.json of the model", VLLM),
    refused("--tool-parser-plugin", "--tool-call-parser FILE.py describes how a model writes calls", *BOTH),
    refused("--logprobs-mode", "logprobs are those of the unchanged logits", *BOTH, harmless=("raw_logprobs",)),
    refused("--convert", "/v1/embeddings and /v1/score are served for every model", *BOTH, harmless=("auto", "none")),
    refused("--rope-scaling", "--hf-overrides changes what config.json says", VLLM),
    refused("--root-path", "a proxy in front of the server may add a path", VLLM),
    refused("--response-role", "answers have the role assistant", VLLM, harmless=("assistant",)),
    refused("--task", "what a model is for follows from its config.json", *BOTH, harmless=("auto", "generate")),
    refused("--runner", "what a model is for follows from its config.json", *BOTH, harmless=("auto", "generate")),
    # Variables
    refused("VLLM_API_KEY", "API_KEY is the key, API_KEYS a file of several", VLLM),
    ignored("VLLM_ATTENTION_BACKEND", "there is one attention kernel for each device", VLLM),
    ignored("VLLM_USE_V1", "there is one engine", VLLM),
    ignored("VLLM_LOGGING_LEVEL", "LOG_LEVEL is the severity", VLLM),
    ignored("VLLM_CPU_KVCACHE_SPACE", "KV_CACHE_MEMORY_FRACTION or BLOCK_BS says how large the KV cache is", VLLM),
    ignored("VLLM_CPU_OMP_THREADS_BIND", "CPU_THREADS is the number of threads", VLLM),
    ignored("VLLM_WORKER_MULTIPROC_METHOD", "every rank is a process of its own", VLLM),
)
