"""The most common options of Text Generation Inference and llama-server."""

from __future__ import annotations

from engine.settings.foreign.row import LLAMA, TGI, OptionRow, ignored, refused, sets

ALWAYS_BATCHED = "requests always join at every step"
KEY = "other users of the machine can read a command line; set the variable API_KEY, or --api-keys FILE"
OFFLOAD = "DEVICE says whether the whole model is on a GPU"

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
    refused("--hf-repo", "name the model, org/model, as the argument", LLAMA, aliases=("-hf",)),
    refused("--cache-type-k", "--use-cache-kv-int8 stores keys and values in 8 bits", LLAMA, aliases=("-ctk",)),
    refused("--cache-type-v", "--use-cache-kv-int8 stores keys and values in 8 bits", LLAMA, aliases=("-ctv",)),
    refused("--lora", "--lora-modules name=path", LLAMA),
    refused("--model-draft", "--speculate-method draft --speculate-model-path DIR", LLAMA, aliases=("-md",)),
    refused("--api-key-file", "--api-keys FILE, in JSON", LLAMA),
)
