"""Variables of the PaddleNLP server. Most are settings here under the same name."""

from __future__ import annotations

from engine.settings.foreign.row import PADDLENLP, OptionRow, ignored, sets

SAME = {
    "HEALTH_HTTP_PORT": "",
    "SERVICE_GRPC_PORT": "",
    "METRICS_HTTP_PORT": "",
    "SERVICE_HTTP_PORT": "`-1` serves gRPC only",
    "MODEL_DIR": "",
    "model_name": "",
    "MP_NNODE": "",
    "MP_NUM": "the default is 1 (theirs: 8)",
    "POD_IPS": "",
    "POD_0_IP": "",
    "HOST_IP": "",
    "MAX_SEQ_LEN": "",
    "MAX_DEC_LEN": "",
    "BATCH_SIZE": "up to 1024 (theirs: 128)",
    "BLOCK_BS": "unset: from the free memory (theirs: 50); MAX_MODEL_LEN is the exported length",
    "BLOCK_RATIO": "",
    "BLOCK_SIZE": "",
    "DTYPE": "",
    "DEVICE": "",
    "MAX_CACHED_TASK_NUM": "",
    "PUSH_MODE_HTTP_WORKERS": "",
    "DISABLE_STREAMING": "",
    "USE_WARMUP": "",
    "USE_CACHE_KV_INT8": "",
    "OUTPUT_LOG_TO_CONSOLE": "with `start_server --foreground`",
    "CHECK_HEALTH_INTERVAL": "",
    "SPECULATE_METHOD": "`ngram`, `suffix`, `mtp`, `eagle3` or `draft`",
    "SPECULATE_MODEL_PATH": "a draft model with the same tokenizer, or an EAGLE-3 head; `mtp` reads its layer from the"
    " served checkpoint",
    "SPECULATE_MAX_DRAFT_TOKEN_NUM": "",
    "SPECULATE_MAX_NGRAM_SIZE": "",
    "FD_LOG_DIR": "",
    "FD_LOG_BACKUP_COUNT": "",
}
OLD_NAMES = {
    "HTTP_PORT": "HEALTH_HTTP_PORT",
    "GRPC_PORT": "SERVICE_GRPC_PORT",
    "METRICS_PORT": "METRICS_HTTP_PORT",
    "PUSH_MODE_HTTP_PORT": "SERVICE_HTTP_PORT",
}
SOCKET = "the engine listens on a Unix socket in RUN_DIR"
NONE_BEFORE = "the PaddleNLP server reads it and does nothing with it"
WITHOUT_EFFECT = {
    "INTER_PROC_PORT": SOCKET,
    "INTER_QUEUE_PORT": SOCKET,
    "INFER_QUEUE_PORT": SOCKET,
    "MAX_PREFILL_BATCH": "MAX_NUM_BATCHED_TOKENS limits a step instead",
    "ENC_DEC_BLOCK_NUM": "blocks are taken one by one as a request grows",
    "ENGINE_MAX_NEED_NUM": "requests join at every step",
    "USE_HF_TOKENIZER": "the tokenizer is always Hugging Face's",
    "USE_FAST_TOKENIZER": "the tokenizer is always the fast one",
    "DISABLE_CAPACITY_CHECKER": "a request that cannot fit is refused with the numbers",
    "USE_CUSTOM_HEALTH_CHECKER": "the health port is always served",
    "MAX_STOP_SEQS_NUM": "the limit is fixed: 64 stop sequences",
    "STOP_SEQS_MAX_LEN": "the limit is fixed: 1024 characters a stop sequence",
    "SERVER_WAITTING_TIME": "ranks wait for each other",
    "SHM_UUID": "no named shared memory is used",
    "SPECULATE_MODEL_QUANT_TYPE": "a draft model keeps the number format of its checkpoint",
    "USE_CACHE_KV_INT4": "an int4 KV cache is not supported; USE_CACHE_KV_INT8=1 stores 8 bits a number",
    "USE_DYNAMIC_GRAPH": "the exported graph is what runs",
    "RETURN_FULL_HIDDEN_STATES": "an export for SPECULATE_METHOD=mtp returns them",
    "FLAGS_blha_use_fp32_qk_sum": "scores are always summed in float32",
    "FLAGS_mla_use_tensorcore": "there is one attention kernel for each device",
    "FLAGS_cascade_attention_max_partition_size": "the number of partitions follows from the load of the GPU",
    "CONFIG_JSON_FILE": "the file is config.json, in MODEL_DIR",
    "FD_MODEL_CONFIG_PATH": "the file is config.json, in MODEL_DIR",
    "DISTRIBUTED_CONFIG": "POD_IPS and MP_NNODE say which machines there are",
    "FD_DEBUG": "LOG_LEVEL=DEBUG logs more",
    "BAD_TOKENS": "the request field bad_words_token_ids says what must not appear",
    "FIRST_TOKEN_ID": NONE_BEFORE,
    "STOP_THRESHOLD": NONE_BEFORE,
    "RECORD_TIME_INTERVAL": NONE_BEFORE,
}

ROWS: tuple[OptionRow, ...] = (
    OptionRow("CUDA_VISIBLE_DEVICES", (PADDLENLP,), remark="the same: the GPUs that may be used"),
    OptionRow("tag", (PADDLENLP,), remark="the same: the version folder of a MODEL_MIRROR"),
    *(sets(name, name, PADDLENLP, remark=remark) for name, remark in SAME.items()),
    *(sets(name, env, PADDLENLP, remark="name before version 3.0.0") for name, env in OLD_NAMES.items()),
    *(ignored(name, why, PADDLENLP) for name, why in WITHOUT_EFFECT.items()),
)
