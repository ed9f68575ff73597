"""Variables that are set and do nothing: the predecessor's that mean nothing here, and misspelt ones."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import fields

from engine.settings.config import Config

# Settings of the predecessor, and why each changes nothing here.
WITHOUT_EFFECT = {
    **dict.fromkeys(
        ("INTER_PROC_PORT", "INTER_QUEUE_PORT", "INFER_QUEUE_PORT"), "the engine listens on a Unix socket in RUN_DIR"
    ),
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
    "SPECULATE_MODEL_PATH": "drafts come from the tokens themselves, no draft model is supported",
    "SPECULATE_MODEL_QUANT_TYPE": "drafts come from the tokens themselves, no draft model is supported",
    "USE_CACHE_KV_INT4": "an int4 KV cache is not supported",
    "USE_DYNAMIC_GRAPH": "the exported graph is what runs",
    "RETURN_FULL_HIDDEN_STATES": "only speculative decoding would need them",
    "FLAGS_blha_use_fp32_qk_sum": "scores are always summed in float32",
    "FLAGS_mla_use_tensorcore": "no model with latent attention is supported",
    "FLAGS_cascade_attention_max_partition_size": "the blocks of a request are shared out by how busy the GPU is",
    "CONFIG_JSON_FILE": "the file is config.json, in MODEL_DIR",
    "FD_MODEL_CONFIG_PATH": "the file is config.json, in MODEL_DIR",
    "DISTRIBUTED_CONFIG": "POD_IPS and MP_NNODE say which machines there are",
    "FD_DEBUG": "LOG_LEVEL=DEBUG logs more",
    "BAD_TOKENS": "bad_words_token_ids of a request are what must not appear",
    "FIRST_TOKEN_ID": "it had none before",
    "STOP_THRESHOLD": "it had none before",
    "RECORD_TIME_INTERVAL": "it had none before",
    "INFERENCE_MSG_QUEUE_ID": "no System V message queue is used",
}
OF_AN_EXPORT = ("dtype", "quant_type", "block_size", "use_cache_kv_int8", "load_format", "hf_overrides")


def settings_without_effect(environ: Mapping[str, str] = os.environ) -> list[str]:
    """One sentence for every variable of the predecessor that is set and does nothing here."""
    return [f"{name} has no effect: {why}" for name, why in WITHOUT_EFFECT.items() if environ.get(name)]


def set_for_an_export(config: Config) -> list[str]:
    """What does nothing for a model that is exported already."""
    are_set = [f for f in fields(Config) if f.name in OF_AN_EXPORT and getattr(config, f.name) != f.default]
    return [f.metadata["setting"].env for f in are_set]


def likely_misspelt(environ: Mapping[str, str] = os.environ) -> list[str]:
    """One sentence for every variable that is none of ours but looks like one: it was probably meant to be."""
    settings = [f.metadata["setting"] for f in fields(Config)]
    known = {name.upper(): name for s in settings for name in (s.env, *s.old)} | {
        name.upper(): name for name in WITHOUT_EFFECT
    }
    sentences = []
    for name in sorted(environ.keys() - set(known.values())):
        if close := difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.88):
            sentences.append(f"{name} is no setting, did you mean {known[close[0]]}?")
    return sentences
