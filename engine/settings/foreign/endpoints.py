"""Endpoints of other servers that this one does not have, and what there is instead. The gateway says so in its answer
to such a path."""

from __future__ import annotations

from engine.settings.foreign.row import FASTDEPLOY, LLAMA, PADDLENLP, SGLANG, TGI, VLLM

OPENAI = "OpenAI"
BASE = "the paths are below it, such as /v1/chat/completions"
PAUSE = "requests cannot be paused; `stop_server` lets open ones end"
RELOAD = "`start_server --reload MODEL` replaces the model of the running server"
SLEEP = "`stop_server` frees the memory of the model, and `start_server` loads it again"
LOCAL = "requests wait in this server alone; MAX_CACHED_TASK_NUM limits them"
CACHE = "the prefix cache cannot be emptied; requests with different `cache_salt` share nothing of it"
POOLED = "POST /v1/embeddings, /v1/score and /v1/rerank"
ABOUT = "GET /v1/models, /status and /version"
SPEECH, PICTURES = "speech is neither read nor written", "images are read in chats, and not written"
FILES = "the command `run_batch` sends a file of requests to a running server"
EXPERTS = "experts stay where they are while the server runs"
STATE = "/v1/responses keeps conversations with `previous_response_id`"
GUARD = "no model that judges texts is served beside the model"
PROFILE = "traces go to OTEL_EXPORTER_OTLP_ENDPOINT"
# path -> the server that has it, and what to use instead
ENDPOINTS: dict[str, tuple[str, str]] = {
    "/v1": (PADDLENLP, BASE),
    **dict.fromkeys(("/v1/pause", "/v1/resume", "/v1/is_paused"), (FASTDEPLOY, PAUSE)),
    **dict.fromkeys(("/v1/sleep", "/v1/wakeup"), (FASTDEPLOY, SLEEP)),
    **dict.fromkeys(("/v1/update_weights", "/update_model_weight", "/clear_load_weight"), (FASTDEPLOY, RELOAD)),
    **dict.fromkeys(("/controller/reset_scheduler", "/controller/scheduler"), (FASTDEPLOY, LOCAL)),
    **dict.fromkeys(("/v1/reward", "/v1/pooling"), (FASTDEPLOY, POOLED)),
    **dict.fromkeys(("/pooling", "/classify"), (VLLM, POOLED)),
    **dict.fromkeys(("/pause", "/resume", "/is_paused"), (VLLM, PAUSE)),
    **dict.fromkeys(("/sleep", "/wake_up", "/is_sleeping"), (VLLM, SLEEP)),
    **dict.fromkeys(("/reset_prefix_cache", "/reset_mm_cache"), (VLLM, CACHE)),
    **dict.fromkeys(("/start_profile", "/stop_profile"), (VLLM, PROFILE)),
    "/invocations": (VLLM, "POST /v1/chat/completions, /v1/completions or /v1/embeddings"),
    "/server_info": (VLLM, ABOUT),
    "/tokenizer_info": (VLLM, "POST /tokenize and /detokenize"),
    "/scale_elastic_ep": (VLLM, EXPERTS),
    **dict.fromkeys(("/get_model_info", "/model_info", "/get_server_info"), (SGLANG, ABOUT)),
    "/health_generate": (SGLANG, "GET /v2/health/ready, which asks the engine"),
    "/flush_cache": (SGLANG, CACHE),
    "/abort_request": (SGLANG, "POST /v1/abort with a `req_id`"),
    "/encode": (SGLANG, "POST /v1/embeddings"),
    **dict.fromkeys(("/update_weights_from_disk", "/update_weights_from_tensor"), (SGLANG, RELOAD)),
    **dict.fromkeys(("/release_memory_occupation", "/resume_memory_occupation"), (SGLANG, SLEEP)),
    **dict.fromkeys(("/get_load", "/v1/loads"), (SGLANG, "GET /load and /metrics")),
    "/generate_stream": (TGI, "POST /v1/completions with `stream`, or /v2/models/model/generate_stream"),
    "/info": (TGI, ABOUT),
    "/completion": (LLAMA, "POST /v1/completions"),
    "/infill": (LLAMA, "POST /v1/completions with the model's own tokens for a gap in a text"),
    "/embedding": (LLAMA, "POST /v1/embeddings"),
    **dict.fromkeys(("/props", "/slots"), (LLAMA, ABOUT)),
    "/apply-template": (LLAMA, "POST /tokenize with `messages`"),
    **dict.fromkeys(("/v1/files", "/v1/batches", "/v1/uploads"), (OPENAI, FILES)),
    **dict.fromkeys(("/v1/assistants", "/v1/threads", "/v1/conversations", "/v1/vector_stores"), (OPENAI, STATE)),
    **dict.fromkeys(("/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations"), (OPENAI, SPEECH)),
    "/v1/realtime": (OPENAI, SPEECH),
    **dict.fromkeys(("/v1/images/generations", "/v1/images/edits", "/v1/images/variations"), (OPENAI, PICTURES)),
    "/v1/moderations": (OPENAI, GUARD),
    "/v1/fine_tuning/jobs": (OPENAI, "models are not trained here; LoRA adapters of other programs are served"),
}


def instead_of(path: str) -> tuple[str, str, str] | None:
    """Return the endpoint of another server to which a path belongs, the server, and what there is instead."""
    if path in ENDPOINTS:
        return (path, *ENDPOINTS[path])
    parent = path.rpartition("/")[0]
    return instead_of(parent) if parent not in ("", "/v1") else None
