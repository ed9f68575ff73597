"""Settings: how much is computed at once, and how much may wait."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ConfigError
from engine.settings.setting import setting

DEFAULT_PROMPT_LEN, DEFAULT_ANSWER_LEN = 8192, 1024
LONG_SHARE = 0.04  # of the longest prompt: a longer one is long, as at FastDeploy


@dataclass(frozen=True)
class CapacitySettings:
    max_model_len: int | None = setting(
        None,
        "MAX_MODEL_LEN",
        "prompt and answer together, in tokens, also as 32k (32,000) or 32K (32,768); unset, auto or -1: the length"
        " that the model was made for or exported with",
        minimum=16,
        has_units=True,
        automatic=("auto", "-1"),
    )
    max_seq_len: int | None = setting(
        None,
        "MAX_SEQ_LEN",
        "longest prompt, in tokens; unset: MAX_MODEL_LEN if set, else 8192",
        minimum=1,
        has_units=True,
    )
    max_dec_len: int | None = setting(
        None,
        "MAX_DEC_LEN",
        "longest answer, in tokens; unset: MAX_MODEL_LEN if set, else 1024",
        minimum=1,
        has_units=True,
    )
    batch_size: int = setting(50, "BATCH_SIZE", "requests in one step at most", minimum=1, maximum=1024)
    block_bs: float | None = setting(
        None,
        "BLOCK_BS",
        "KV blocks = BLOCK_BS x blocks of the longest request: MAX_SEQ_LEN + MAX_DEC_LEN, but no more than the model"
        " or MAX_MODEL_LEN allows; unset: from free memory",
        minimum=0.001,
    )
    block_ratio: float = setting(
        0.75,
        "BLOCK_RATIO",
        "share of the blocks that prompts may take at admission; 1 or more: reserve the worst case, never preempt",
        minimum=0.01,
    )
    kv_cache_memory_fraction: float = setting(
        0.5,
        "KV_CACHE_MEMORY_FRACTION",
        "with BLOCK_BS unset: share of the free memory for KV blocks, on the CPU",
        minimum=0.01,
        maximum=0.95,
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "GPU_MEMORY_UTILIZATION",
        "with BLOCK_BS unset: share of the GPU's memory for weights, steps and KV blocks together",
        minimum=0.01,
        maximum=0.99,
    )
    num_gpu_blocks_override: int | None = setting(
        None, "NUM_GPU_BLOCKS_OVERRIDE", "KV blocks on a GPU, whatever the rules above say", minimum=1
    )
    use_cudagraph: bool = setting(True, "USE_CUDAGRAPH", "record decode steps on a GPU once and replay them")
    batch_invariant: bool = setting(
        False, "BATCH_INVARIANT", "on a GPU, too, no bit of an answer depends on other requests; slower (docs/gpu.md)"
    )
    cudagraph_capture_sizes: str = setting(
        "1,2,4,8,16,24,32,48,64,96,128,160,192,224,256",
        "CUDAGRAPH_CAPTURE_SIZES",
        "batch sizes that are recorded, up to BATCH_SIZE; a batch takes the next larger one",
    )
    max_cached_task_num: int = setting(
        128, "MAX_CACHED_TASK_NUM", "waiting requests; beyond, new ones are refused", minimum=1
    )
    max_waiting_tokens: int = setting(
        1 << 20,
        "MAX_WAITING_TOKENS",
        "tokens of all waiting prompts together; beyond, new requests are refused",
        minimum=1,
    )
    queue_timeout_s: float = setting(
        600.0,
        "QUEUE_TIMEOUT",
        "seconds that a request may wait until it begins, from its arrival on; 0: for ever",
        minimum=0,
    )
    max_num_batched_tokens: int | None = setting(
        None,
        "MAX_NUM_BATCHED_TOKENS",
        "tokens of one step, or twice BATCH_SIZE if more; longer prompts are prefilled in chunks beside decodes;"
        " unset: 256 on the CPU, 8192 on a GPU",
        minimum=1,
        has_units=True,
    )
    max_num_partial_prefills: int | None = setting(
        None,
        "MAX_NUM_PARTIAL_PREFILLS",
        "prompts that one step computes side by side, in equal shares at least; unset: in the order of their arrival,"
        " as many as fit",
        minimum=1,
    )
    max_long_partial_prefills: int | None = setting(
        None,
        "MAX_LONG_PARTIAL_PREFILLS",
        "long prompts among them; others wait while short ones go before them; unset: 1 with MAX_NUM_PARTIAL_PREFILLS",
        minimum=1,
    )
    long_prefill_token_threshold: int = setting(
        0,
        "LONG_PREFILL_TOKEN_THRESHOLD",
        "a prompt of more tokens is long; 0: 4% of MAX_SEQ_LEN",
        minimum=0,
    )
    enable_prefix_caching: bool = setting(
        True, "ENABLE_PREFIX_CACHING", "keep full blocks for prompts that begin alike"
    )
    swap_space: float = setting(
        0.0,
        "SWAP_SPACE",
        "GiB of the host's memory, of all ranks together, for blocks that were pushed out of a GPU's KV cache",
        minimum=0,
    )
    experts_on_host: float = setting(
        0.0,
        "EXPERTS_ON_HOST",
        "GiB of a GPU model's experts, of all ranks together, that stay in the host's memory (docs/gpu.md)",
        minimum=0,
    )
    cpu_threads: int = setting(
        0,
        "CPU_THREADS",
        "threads of the CPU ops; 0: one per core, in a container no more than its CPU quota",
        minimum=0,
        maximum=1024,
    )
    speculate_method: str = setting(
        "none",
        "SPECULATE_METHOD",
        "several tokens are tried in a step, with the same answers: `ngram` tries what followed the same tokens before,"
        " `suffix` what followed the longest match in the request and in recent answers to the same API key, `draft`"
        " what a smaller model would write (SPECULATE_MODEL_PATH), `mtp` what the layer of the checkpoint that is made"
        " for it writes, `eagle3` what an EAGLE-3 head writes (SPECULATE_MODEL_PATH)",
        choices=("none", "ngram", "suffix", "draft", "mtp", "eagle3"),
        synonyms={"draft_model": "draft"},  # vLLM's name
    )
    speculate_model_path: str = setting(
        "",
        "SPECULATE_MODEL_PATH",
        "draft model of SPECULATE_METHOD=draft: the folder of a checkpoint or exported model with the tokenizer of"
        " the served one, or the name of a model to fetch; or the EAGLE-3 head of SPECULATE_METHOD=eagle3",
    )
    speculate_max_draft_token_num: int = setting(
        4, "SPECULATE_MAX_DRAFT_TOKEN_NUM", "tokens tried in a step at most", minimum=1, maximum=16
    )
    speculate_max_ngram_size: int = setting(
        3, "SPECULATE_MAX_NGRAM_SIZE", "tokens that must have occurred before, at most", minimum=1, maximum=16
    )
    use_warmup: bool = setting(False, "USE_WARMUP", "run the longest step once before the server is ready")

    @property
    def max_prompt_len(self) -> int:
        return self.max_seq_len or self.max_model_len or DEFAULT_PROMPT_LEN

    @property
    def max_answer_len(self) -> int:
        return self.max_dec_len or self.max_model_len or DEFAULT_ANSWER_LEN

    def model_len(self, made_for: int) -> int:
        """Return how long prompt and answer may be together, of a model that was made for, or exported with, so many
        tokens. Raises ConfigError where MAX_MODEL_LEN is more."""
        if self.max_model_len and self.max_model_len > made_for:
            raise ConfigError(f"MAX_MODEL_LEN is {self.max_model_len}, the model takes at most {made_for} tokens")
        return self.max_model_len or made_for

    @property
    def long_prefill_tokens(self) -> int:
        return self.long_prefill_token_threshold or int(LONG_SHARE * self.max_prompt_len)

    def check_partial_prefills(self) -> None:
        most, most_long = self.max_num_partial_prefills, self.max_long_partial_prefills
        if most and most_long and most_long > most:
            raise ConfigError(
                f"MAX_LONG_PARTIAL_PREFILLS is {most_long}, it must be at most MAX_NUM_PARTIAL_PREFILLS, {most}"
            )

    def check_swap_space(self) -> None:
        if self.swap_space and not self.enable_prefix_caching:
            raise ConfigError(
                f"SWAP_SPACE is {self.swap_space:g} and ENABLE_PREFIX_CACHING is 0: only what can be found again by its"
                " tokens is kept"
            )

    def check_capture_sizes(self) -> None:
        sizes = self.cudagraph_capture_sizes.split(",")
        if not all(size.strip().isdecimal() and int(size) for size in sizes):
            raise ConfigError(
                f"CUDAGRAPH_CAPTURE_SIZES is {self.cudagraph_capture_sizes!r}, it must be whole numbers from 1 with"
                " commas between them"
            )
