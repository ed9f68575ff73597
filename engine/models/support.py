"""The support matrix of docs/models.md: `python -m engine.models.support` prints it.

Tests compare it with the registry of families, the families that the GPU tests cover, and what each precision computes
for each family. The module imports neither Paddle nor torch.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

RUN, NOT_RUN, REFUSED = "yes", "not run", "no"
DEVICES = ("CPU", "CPU, several ranks", "GPU", "several GPUs")


@dataclass(frozen=True)
class FamilySupport:
    """Row of the table of families: the models of a `model_type`, and where they have run, in the order of DEVICES."""

    model_type: str
    models: str
    devices: Sequence[str] = (RUN,) * 4

    @property
    def runs_on_gpus(self) -> bool:
        """Return whether GPUs have kernels for all ops of the family."""
        return self.devices[2] != REFUSED


@dataclass(frozen=True)
class PrecisionSupport:
    """Row of the table of precisions: the setting that selects it, and where it has run, in the order of DEVICES.

    `option` is the field of `ExportOptions` that corresponds to the setting, with its value.
    """

    stored: str
    setting: str
    option: tuple[str, object]
    devices: Sequence[str] = (RUN,) * 4


FAMILIES = (
    FamilySupport("llama", "Llama 1, 2, 3.x, and models of the same network"),
    FamilySupport("mistral", "Mistral 7B, Nemo, Small; of `mistral3` checkpoints the language model"),
    FamilySupport("ministral", "Ministral 8B"),
    FamilySupport("ministral3", "Ministral 3, up to 16,384 tokens"),
    FamilySupport("qwen2", "Qwen2, Qwen2.5; with or without a sliding window"),
    FamilySupport("qwen3", "Qwen3, dense models"),
    FamilySupport("ernie4_5", "ERNIE 4.5, dense models (0.3B)"),
    FamilySupport("exaone4", "EXAONE 4"),
    FamilySupport("gemma", "Gemma 1"),
    FamilySupport("gemma2", "Gemma 2"),
    FamilySupport("gemma3_text", "Gemma 3; of `gemma3` checkpoints the language model"),
    FamilySupport("glm", "GLM-4 (2024), GLM-Edge"),
    FamilySupport("glm4", "GLM-4 (0414)"),
    FamilySupport("granite", "Granite 3, dense models"),
    FamilySupport("hunyuan_v1_dense", "HunYuan V1, dense models"),
    FamilySupport("internlm3", "InternLM3"),
    FamilySupport("olmo2", "OLMo 2"),
    FamilySupport("olmo3", "OLMo 3"),
    FamilySupport("phi3", "Phi-3, Phi-3.5, Phi-4"),
    FamilySupport("seed_oss", "Seed-OSS"),
    FamilySupport("smollm3", "SmolLM3"),
    FamilySupport("starcoder2", "StarCoder2"),
    FamilySupport("arcee", "Arcee (AFM 4.5B)"),
    FamilySupport("nemotron", "Nemotron 4, Minitron, dense models"),
    FamilySupport("qwen3_5", "Qwen3.5, Qwen3.6, Qwen3.8, dense models"),
    FamilySupport("qwen3_5_text", "Qwen3.5, Qwen3.6, Qwen3.8, dense models"),
    FamilySupport("qwen3_5_moe", "Qwen3.5, Qwen3.6 with experts (35B-A3B, 122B-A10B, 397B-A17B)"),
    FamilySupport("qwen3_5_moe_text", "Qwen3.5, Qwen3.6 with experts (35B-A3B, 122B-A10B, 397B-A17B)"),
    FamilySupport("qwen3_next", "Qwen3-Next, Qwen3-Coder-Next"),
    FamilySupport("deepseek_v2", "DeepSeek V2"),
    FamilySupport("deepseek_v3", "DeepSeek V3, V3.1, R1"),
    FamilySupport("kimi_k2", "Kimi K2"),
    FamilySupport("glm4_moe_lite", "GLM-4.7-Flash"),
    FamilySupport("mistral4", "Mistral Small 4, text-only checkpoints"),
    FamilySupport("mixtral", "Mixtral 8x7B, 8x22B"),
    FamilySupport("qwen2_moe", "Qwen1.5-MoE, Qwen2-57B-A14B"),
    FamilySupport("qwen3_moe", "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder"),
    FamilySupport("olmoe", "OLMoE"),
    FamilySupport("ernie4_5_moe", "ERNIE 4.5 with experts (21B-A3B, 300B-A47B)"),
    FamilySupport("gpt_oss", "gpt-oss (20B, 120B)"),
    FamilySupport("glm4_moe", "GLM-4.5, GLM-4.6"),
    FamilySupport("dots1", "dots.llm1"),
    FamilySupport("minimax_m2", "MiniMax-M2"),
    FamilySupport("granitemoe", "Granite 3 with experts"),
    FamilySupport("paddleocr_vl", "PaddleOCR-VL (0.9B)"),
    FamilySupport("qwen2_5_vl", "Qwen2.5-VL"),
    FamilySupport("qwen3_vl", "Qwen3-VL, dense models"),
    FamilySupport("qwen3_vl_moe", "Qwen3-VL with experts (30B-A3B, 235B-A22B)"),
)
PRECISIONS = (
    PrecisionSupport("32-bit float", "DTYPE=float32", ("dtype", "float32")),
    PrecisionSupport("bfloat16", "DTYPE=bfloat16", ("dtype", "bfloat16")),
    PrecisionSupport("float16", "DTYPE=float16", ("dtype", "float16"), (REFUSED, REFUSED, RUN, REFUSED)),
    PrecisionSupport("8-bit integer", "QUANT_TYPE=weight_only_int8", ("quant_type", "weight_only_int8")),
    PrecisionSupport("8-bit integer, activations too", "QUANT_TYPE=a8w8", ("quant_type", "a8w8")),
    PrecisionSupport("4-bit integer", "QUANT_TYPE=weight_only_int4", ("quant_type", "weight_only_int4")),
    PrecisionSupport(
        "4-bit integer, groups of 32", "QUANT_TYPE=weight_only_int4_g32", ("quant_type", "weight_only_int4_g32")
    ),
    PrecisionSupport("8-bit float (e4m3)", "QUANT_TYPE=weight_only_fp8", ("quant_type", "weight_only_fp8")),
    PrecisionSupport(
        "8-bit float, activations too (CPUs: bfloat16)",
        "QUANT_TYPE=a8w8_fp8",
        ("quant_type", "a8w8_fp8"),
    ),
    PrecisionSupport(
        "8-bit float in blocks of 128 x 128, activations too (CPUs: bfloat16)",
        "QUANT_TYPE=block_wise_fp8",
        ("quant_type", "block_wise_fp8"),
    ),
    PrecisionSupport(
        "4-bit integer for experts or MLPs, `a8w8_fp8` for the rest",
        "QUANT_TYPE=a8w8_fp8_wint4",
        ("quant_type", "a8w8_fp8_wint4"),
    ),
    PrecisionSupport(
        "4-bit float (MXFP4) for experts, `DTYPE` for the rest (CPUs: bfloat16)",
        "QUANT_TYPE=mxfp4",
        ("quant_type", "mxfp4"),
    ),
    PrecisionSupport("8-bit KV cache", "USE_CACHE_KV_INT8=1", ("int8_cache", True)),
)


def family_table() -> str:
    """Return the table of families in Markdown. Neighbours for the same models share a row."""
    same = itertools.groupby(FAMILIES, lambda each: (each.models, *each.devices))
    rows = [(", ".join(f"`{each.model_type}`" for each in group), *cells) for cells, group in same]
    return _table(("`model_type`", "models", *DEVICES), rows)


def precision_table() -> str:
    """Return the table of precisions in Markdown."""
    rows = [(each.stored, f"`{each.setting}`", *each.devices) for each in PRECISIONS]
    return _table(("precision", "setting", *DEVICES), rows)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a closed pipe, as after `| head`, is no error
    print(f"{family_table()}\n\n{precision_table()}")  # noqa: T201 - this is a command-line script
