"""Environment variables of FastDeploy 2."""

from __future__ import annotations

from engine.settings.foreign.row import FASTDEPLOY, OptionRow, ignored, refused

ONE_POOL = "all blocks are one pool, whose blocks are taken one by one as a request grows"
QUANTIZED = "QUANT_TYPE says how matrices are stored and multiplied"
ATTENTION = "there is one attention kernel for each device"
HUB = "models come from the Hugging Face hub (HF_ENDPOINT) or MODEL_MIRROR"
KERNELS = "there is one kernel for each op and device"
STEPS = "MAX_NUM_BATCHED_TOKENS limits a step instead"
MESSAGES = "processes of the server exchange messages over Unix sockets and shared memory"
IDS_ONLY = "log lines have the ids of requests, never their texts"
FIGURES = "figures are at /metrics, not in the log"
TRACES = "OTEL_EXPORTER_OTLP_ENDPOINT says where traces go, OTEL_SERVICE_NAME whose they are"
HOST_CACHE = "SWAP_SPACE is the cache in the host's memory, which is a part of the engine's process"
PREEMPTED = "a preempted request always continues, from the blocks that the prefix cache still has"
TRANSFERS = "KV_TRANSFER says how blocks are transferred; a decode instance that gets none computes the prompt itself"
EXPERTS = "ranks exchange experts' results by all-reduce"
ONLY_NVIDIA = "NVIDIA GPUs and CPUs are supported; CUDA_VISIBLE_DEVICES chooses GPUs"
EXPORTED = "a checkpoint is exported once into EXPORT_CACHE_DIR, whatever it was written by"
MOONCAKE = "CONFIG_PATH LOCAL_HOSTNAME METADATA_SERVER GLOBAL_SEGMENT_SIZE LOCAL_BUFFER_SIZE PROTOCOL".split()
MOONCAKE += ["RDMA_DEVICES", "MASTER_SERVER_ADDR"]
STOPS = "a request ends when its client leaves"
WITHOUT_EFFECT = {
    "ENABLE_V1_KVCACHE_SCHEDULER": ONE_POOL,
    "FD_ENC_DEC_BLOCK_NUM": ONE_POOL,
    **dict.fromkeys(
        (
            "FD_RESERVE_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL",
            "FD_RESERVE_DECAY_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL",
            "FD_RESERVE_MIN_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL",
        ),
        ONE_POOL,
    ),
    "FD_MAX_KVCACHE_BLOCKS": "BLOCK_BS or NUM_GPU_BLOCKS_OVERRIDE says how large the KV cache is",
    "FD_SAMPLING_CLASS": "all sampling fields of a request are always honoured",
    "FD_ATTENTION_BACKEND": ATTENTION,
    **dict.fromkeys(("FLAGS_flash_attn_version", "USE_FLASH_MLA"), ATTENTION),
    "FLAGS_max_partition_size": "the number of partitions follows from the load of the GPU",
    **dict.fromkeys(("FD_USE_DEEP_GEMM", "FD_USE_MACHETE"), QUANTIZED),
    **dict.fromkeys(("FD_MOE_BACKEND", "FD_ENABLE_PDL", "FD_CUSTOM_AR_MAX_SIZE_MB", "USE_TBO"), KERNELS),
    **dict.fromkeys(
        ("FD_TRITON_KERNEL_CACHE_DIR", "TRITON_KERNEL_CACHE_DIR"),
        "TRITON_CACHE_DIR is the variable of Triton's compiler",
    ),
    "INFERENCE_MSG_QUEUE_ID": "no System V message queue is used",
    **dict.fromkeys(("FD_USE_GET_SAVE_OUTPUT_V1", "FD_ZMQ_SNDHWM", "ZMQ_SEND_BATCH_DATA"), MESSAGES),
    **dict.fromkeys(
        ("FD_ENGINE_TASK_QUEUE_WITH_SHM", "FD_ENABLE_E2W_TENSOR_CONVERT", "FD_DEALER_CONNECTIONS"), MESSAGES
    ),
    **dict.fromkeys(("FD_MODEL_SOURCE", "DOWNLOAD_SOURCE", "AISTUDIO_ENDPOINT"), HUB),
    "FD_MODEL_CACHE": "MODEL_DIR says where models are kept",
    **dict.fromkeys(("FD_ENABLE_MODEL_LOAD_CACHE", "FD_FOR_TORCH_MODEL_FORMAT", "FD_USE_FASTSAFETENSOR"), EXPORTED),
    "FD_LOG_LEVEL": "LOG_LEVEL is the severity",
    **dict.fromkeys(("FD_LOG_REQUESTS", "FD_LOG_REQUESTS_LEVEL", "FD_LOG_MAX_LEN"), IDS_ONLY),
    **dict.fromkeys(("FD_CONSOLE_SCHEDULER_METRICS", "FD_CONSOLE_DECODE_LOG_INTERVAL"), FIGURES),
    "PROMETHEUS_MULTIPROC_DIR": "metrics need no files",
    **dict.fromkeys(("TRACES_ENABLE", "TRACES_EXPORTER", "EXPORTER_OTLP_ENDPOINT", "FD_TRACE"), TRACES),
    "EXPORTER_OTLP_HEADERS": "OTEL_EXPORTER_OTLP_HEADERS is what is sent with traces",
    **dict.fromkeys(("FD_SERVICE_NAME", "FD_HOST_NAME"), TRACES),
    "DO_NOT_TRACK": "no usage statistics are reported",
    "FD_DISABLE_CHUNKED_PREFILL": "long prompts are always computed in chunks",
    **dict.fromkeys(("MAX_PREFILL_NUM", "FD_ENABLE_MAX_PREFILL"), STEPS),
    **dict.fromkeys(("FD_DISABLED_RECOVER", "FD_SAVE_OUTPUT_CACHE_FOR_PREEMPTED_REQUEST"), PREEMPTED),
    "FD_USE_HF_TOKENIZER": "the tokenizer is always Hugging Face's",
    "FD_DETERMINISTIC_MODE": "BATCH_INVARIANT=1 makes answers independent of other requests",
    "FD_DETERMINISTIC_SPLIT_KV_SIZE": "BATCH_INVARIANT=1 makes answers independent of other requests",
    **dict.fromkeys(
        ("FD_WORKER_ALIVE_TIMEOUT", "FD_TOKEN_PROCESSOR_HEALTH_TIMEOUT"),
        "CHECK_HEALTH_INTERVAL is the time after which the engine hangs",
    ),
    "FD_SUPPORT_MAX_CONNECTIONS": "MAX_CACHED_TASK_NUM limits the requests that wait",
    "FD_MAX_STOP_SEQS_NUM": "the limit is fixed: 64 stop sequences",
    "FD_STOP_SEQS_MAX_LEN": "the limit is fixed: 1024 characters a stop sequence",
    "FD_FILL_BITMASK_BATCH": "processes of their own compile grammars and compute masks",
    "FD_ENABLE_REQUEST_DISCONNECT_STOP_INFERENCE": STOPS,
    "FD_ENABLE_RETURN_TEXT": "answers always have their text",
    "FD_ENABLE_ASYNC_LLM": "`engine.llm.LLM` answers a list of prompts together; programs ask a server for streams",
    "FD_ENABLE_MULTI_API_SERVER": "PUSH_MODE_HTTP_WORKERS is the number of HTTP processes",
    **dict.fromkeys(("FD_CACHE_PROC_EXIT_TIMEOUT", "FD_CACHE_PROC_ERROR_COUNT", "FD_CACHE_PARAMS"), HOST_CACHE),
    **dict.fromkeys(("FD_ENABLE_SWAP_SPACE_CLEARING", "FILE_BACKEND_STORAGE_DIR"), HOST_CACHE),
    **dict.fromkeys(("FD_PD_CHANGEABLE", "FD_PD_REORDER", "FD_ENABLE_CACHE_TASK"), TRANSFERS),
    **dict.fromkeys(("FD_ENABLE_PD_RDMA_EAGER_CONNECT", "FD_PREFILL_WAIT_DECODE_RESOURCE_SECONDS"), TRANSFERS),
    "PREFILL_CONTINUOUS_REQUEST_DECODE_RESOURCES": TRANSFERS,
    **dict.fromkeys(("FLAGS_use_pd_disaggregation", "FLAGS_use_pd_disaggregation_per_chunk"), TRANSFERS),
    "KVCACHE_RDMA_NICS": "UCX_NET_DEVICES chooses the network of KV_TRANSFER=nixl",
    **dict.fromkeys(("FD_EP_BATCHED_TOKEN_TIMEOUT", "FD_EP_MAX_PREFETCH_TASK_NUM", "FD_USE_PFCC_DEEP_EP"), EXPERTS),
    "FD_TP_GROUP_GID_OFFSET": EXPERTS,
    **dict.fromkeys((f"MOONCAKE_{name}" for name in MOONCAKE), HOST_CACHE),
    "FD_BUILDING_ARCS": "kernels are compiled for the GPU that is there",
}
# variable -> what to use instead, and the values that ask for nothing
NOT_SUPPORTED = {
    "FD_API_KEY": ("API_KEY is the key, API_KEYS a file of several", ()),
    "FD_LIMIT_THINKING_CONTENT_TRUNCATE_STR": ("reasoning is ended by the `</think>` of the model", ("</think>",)),
    "FD_PLUGINS": ("models, parsers and processors are a part of the server", ()),
    "FD_ENABLE_INTERNAL_ADAPTER": ("requests come over HTTP and gRPC", ("0",)),
    "COMPRESSION_RATIO": ("HF_OVERRIDES changes what config.json says", ()),
    "ROPE_THETA": ("HF_OVERRIDES changes what config.json says", ()),
    **dict.fromkeys(("XPU_VISIBLE_DEVICES", "HPU_VISIBLE_DEVICES", "MACA_VISIBLE_DEVICES"), (ONLY_NVIDIA, ())),
    "FD_ENABLE_V1_UPDATE_WEIGHTS": ("`start_server --reload MODEL` replaces the model", ("0",)),
}

ROWS: tuple[OptionRow, ...] = (
    *(ignored(name, why, FASTDEPLOY) for name, why in WITHOUT_EFFECT.items()),
    *(refused(name, instead, FASTDEPLOY, harmless=harmless) for name, (instead, harmless) in NOT_SUPPORTED.items()),
)
