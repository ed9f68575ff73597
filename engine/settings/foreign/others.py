"""The most common options of Text Generation Inference and llama-server."""

from __future__ import annotations

from engine.settings.foreign.row import LLAMA, TGI, OptionRow, ignored, refused, sets

ALWAYS_BATCHED = "requests always join at every step"
KEY = "other users of the machine can read a command line; set the variable API_KEY, or --api-keys FILE"
OFFLOAD = "DEVICE says whether the whole model is on a GPU"
EXPERTS = "EXPERTS_ON_HOST leaves experts in the host's memory, other weights are in the GPU's"
GPUS = "CUDA_VISIBLE_DEVICES chooses GPUs, --mp-num divides a model among them"
SAMPLING = "defaults of requests are in generation_config.json of the model"
OVERRIDES = "--hf-overrides changes what config.json says"
PREFIXES = "blocks of prompts that begin alike are always kept, as long as there is room"
LLAMA_REFUSED = {  # what to use instead -> option with its aliases
    EXPERTS: ("--n-cpu-moe", "-ncmoe", "--cpu-moe", "-cmoe", "--override-tensor", "-ot"),
    GPUS: ("--split-mode", "-sm", "--tensor-split", "-ts", "--main-gpu", "-mg"),
    SAMPLING: (
        *("--temp", "--temperature", "--top-k", "--top-p", "--min-p", "--repeat-penalty", "--presence-penalty"),
        *("--frequency-penalty", "--samplers", "--repeat-last-n"),
    ),
    OVERRIDES: ("--rope-freq-base", "--rope-freq-scale", "--rope-scale", "--override-kv"),
    "name a file, or org/model": ("--model-url", "-mu", "--hf-file", "-hff"),
    "requests have the fields guided_grammar and guided_json": ("--grammar", "--json-schema", "--json-schema-file"),
    "requests have the field chat_template_kwargs": ("--chat-template-kwargs",),
    "the chat template is the one in the model's folder or file": ("--chat-template-file",),
    "--reasoning-parser says how reasoning is recognised": ("--reasoning-format",),
    "a checkpoint in safetensors has the vision tower": ("--mmproj", "-mm"),
    "requests have the field pooling": ("--pooling",),
    "FD_LOG_DIR is the folder of the logs": ("--log-file",),
}
LLAMA_WITHOUT_EFFECT = {  # reason -> option with its aliases
    "--ubatch-size is the number of tokens of a step": ("-b",),
    "CPU_THREADS is the number of threads": ("--threads-batch", "-tb"),
    "memory is where the threads run that use it": ("--numa",),
    PREFIXES: ("--cache-reuse", "--cache-ram", "--slot-prompt-similarity", "-sps"),
    "requests have the field timeout": ("--timeout", "-to"),
    "drafts are made while they save time": ("--draft-min",),
}
LLAMA_FLAGS_WITHOUT_EFFECT = {  # reason -> option with its aliases
    "/v1/rerank is always served": ("--reranking", "--rerank"),
    "GET /status and GET /metrics are always served": ("--slots", "--props"),
    "the KV cache is one pool of blocks for all requests": ("--kv-unified", "--swa-full"),
}

ROWS: tuple[OptionRow, ...] = (
    sets("--model-id", "model_name", TGI),
    sets("--num-shard", "MP_NUM", TGI),
    sets("--hostname", "SERVICE_HOST", TGI),
    sets("--prometheus-port", "METRICS_HTTP_PORT", TGI),
    sets("--max-input-tokens", "MAX_SEQ_LEN", TGI, aliases=("--max-input-length",)),
    sets("--max-total-tokens", "MAX_MODEL_LEN", TGI),
    sets("--max-batch-size", "BATCH_SIZE", TGI),
    sets("--max-batch-prefill-tokens", "MAX_NUM_BATCHED_TOKENS", TGI),
    sets("--cuda-memory-fraction", "GPU_MEMORY_UTILIZATION", TGI),
    sets("--huggingface-hub-cache", "MODEL_DIR", TGI),
    sets("--otlp-endpoint", "OTEL_EXPORTER_OTLP_ENDPOINT", TGI),
    sets(
        "--quantize",
        "QUANT_TYPE",
        TGI,
        values={"fp8": "weight_only_fp8"},
        harmless=("awq", "gptq", "compressed-tensors"),
        why="config.json of the checkpoint says how it is quantized",
        remark="`awq`, `gptq` and `compressed-tensors` are read from the checkpoint",
    ),
    refused("--max-concurrent-requests", "--max-concurrency N, or --batch-size and --max-cached-task-num", TGI),
    refused("--max-batch-total-tokens", "--block-bs or --num-gpu-blocks-override says how large the KV cache is", TGI),
    ignored("--sharded", "--mp-num is the number of ranks", TGI),
    ignored("--waiting-served-ratio", ALWAYS_BATCHED, TGI),
    ignored("--disable-custom-kernels", "there is one kernel for each op and device", TGI, is_flag=True),
    ignored("--json-output", "logs are lines of text in FD_LOG_DIR", TGI, is_flag=True),
    ignored("--usage-stats", "no usage statistics are reported", TGI),
    refused("--lora-adapters", "--lora-modules name=path", TGI),
    refused("--speculate", "--speculate-method ngram, --speculate-max-draft-token-num N", TGI),
    sets("-m", "model_name", LLAMA, remark="a GGUF file, a checkpoint's folder or a name"),
    sets("--ctx-size", "MAX_MODEL_LEN", LLAMA, aliases=("-c",), remark="of each request, not of all together"),
    sets("--alias", "SERVED_MODEL_NAME", LLAMA, aliases=("-a",)),
    sets("--threads", "CPU_THREADS", LLAMA, aliases=("-t",)),
    sets("--parallel", "BATCH_SIZE", LLAMA, aliases=("-np",)),
    sets("--ubatch-size", "MAX_NUM_BATCHED_TOKENS", LLAMA, aliases=("-ub",)),
    sets("--threads-http", "PUSH_MODE_HTTP_WORKERS", LLAMA),
    sets("--ssl-cert-file", "TLS_CERT_FILE", LLAMA),
    sets("--ssl-key-file", "TLS_KEY_FILE", LLAMA),
    sets("--n-predict", "MAX_DEC_LEN", LLAMA, aliases=("-n", "--predict")),
    ignored("--n-gpu-layers", OFFLOAD, LLAMA, aliases=("-ngl", "--gpu-layers")),
    ignored("--cont-batching", ALWAYS_BATCHED, LLAMA, aliases=("-cb",), is_flag=True),
    ignored("--flash-attn", "attention is always computed in blocks", LLAMA, aliases=("-fa",), is_flag=True),
    ignored("--mlock", "a CPU's weights are mapped files", LLAMA, is_flag=True),
    ignored("--no-mmap", "a CPU's weights are mapped files", LLAMA, is_flag=True),
    ignored("--jinja", "the chat template of the model is always applied", LLAMA, is_flag=True),
    ignored("--metrics", "metrics are always served, on METRICS_HTTP_PORT", LLAMA, is_flag=True),
    ignored("--embeddings", "/v1/embeddings is always served", LLAMA, aliases=("--embedding",), is_flag=True),
    sets("--draft-max", "SPECULATE_MAX_DRAFT_TOKEN_NUM", LLAMA, aliases=("--draft", "--draft-n")),
    sets("--verbose", "LOG_LEVEL", LLAMA, values={"1": "DEBUG", "0": "INFO"}, is_flag=True, aliases=("-v",)),
    sets("--warmup", "USE_WARMUP", LLAMA, is_flag=True, remark="off by default"),
    sets("--no-mmproj", "ENABLE_MM", LLAMA, values={"0": "0"}, is_flag=True, remark="turned off"),
    refused(
        "--context-shift",
        "an answer ends where the context is full",
        LLAMA,
        is_flag=True,
        harmless=("0",),
        why="an answer ends where the context is full",
    ),
    refused("--reasoning-budget", "requests have the field thinking_token_budget", LLAMA, harmless=("-1",)),
    refused("--no-webui", "the page is always at /; API_KEY protects its requests", LLAMA, is_flag=True),
    *(refused(first, text, LLAMA, aliases=tuple(more)) for text, (first, *more) in LLAMA_REFUSED.items()),
    *(ignored(first, why, LLAMA, aliases=tuple(more)) for why, (first, *more) in LLAMA_WITHOUT_EFFECT.items()),
    *(
        ignored(first, why, LLAMA, aliases=tuple(more), is_flag=True)
        for why, (first, *more) in LLAMA_FLAGS_WITHOUT_EFFECT.items()
    ),
    refused("--hf-repo", "name the model, org/model, as the argument", LLAMA, aliases=("-hf",)),
    refused("--cache-type-k", "--use-cache-kv-int8 stores keys and values in 8 bits", LLAMA, aliases=("-ctk",)),
    refused("--cache-type-v", "--use-cache-kv-int8 stores keys and values in 8 bits", LLAMA, aliases=("-ctv",)),
    refused("--lora", "--lora-modules name=path", LLAMA),
    refused("--model-draft", "--speculate-method draft --speculate-model-path DIR", LLAMA, aliases=("-md",)),
    refused("--api-key-file", "--api-keys FILE, in JSON", LLAMA),
)
