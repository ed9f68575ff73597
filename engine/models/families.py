"""Registry of the families of models by their model_type. Each family has its own file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.models.config import DecoderConfig
from engine.models.config_fields import ModelError
from engine.models.deepseek import DeepseekV2
from engine.models.deepseek_v3 import DeepseekV3
from engine.models.dots1 import Dots1
from engine.models.ernie4_5 import Ernie45
from engine.models.ernie4_5_moe import Ernie45Moe
from engine.models.exaone4 import Exaone4
from engine.models.gemma import Gemma
from engine.models.gemma2 import Gemma2
from engine.models.gemma3 import Gemma3
from engine.models.glm4 import Glm, Glm4
from engine.models.glm4_moe import Glm4Moe
from engine.models.glm4_moe_lite import Glm4MoeLite
from engine.models.gpt_oss import GptOss
from engine.models.granite import Granite
from engine.models.granitemoe import GraniteMoe
from engine.models.hunyuan import HunYuan
from engine.models.llama import InternLm3, Llama, SeedOss
from engine.models.minimax_m2 import MiniMaxM2
from engine.models.mistral import Ministral3, Mistral
from engine.models.mistral4 import Mistral4
from engine.models.mixtral import Mixtral
from engine.models.nemotron import Arcee, Nemotron
from engine.models.olmo2 import Olmo2, Olmo3
from engine.models.olmoe import Olmoe
from engine.models.paddleocr_vl import PaddleOcrVl
from engine.models.phi3 import Phi3
from engine.models.qwen2 import Qwen2
from engine.models.qwen2_5_vl import Qwen25Vl
from engine.models.qwen2_moe import Qwen2Moe
from engine.models.qwen3 import Qwen3
from engine.models.qwen3_5 import Qwen35
from engine.models.qwen3_5_moe import Qwen35Moe
from engine.models.qwen3_moe import Qwen3Moe
from engine.models.qwen3_next import Qwen3Next
from engine.models.qwen3_vl import Qwen3Vl, Qwen3VlMoe
from engine.models.smollm3 import SmolLm3
from engine.models.starcoder2 import Starcoder2
from engine.models.vision_checkpoint import TEXT_PARTS, text_part

FAMILIES: dict[str, type[DecoderConfig]] = {
    "llama": Llama,
    "mistral": Mistral,
    "ministral": Mistral,
    "ministral3": Ministral3,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "qwen3_5": Qwen35,
    "qwen3_5_text": Qwen35,
    "qwen3_5_moe": Qwen35Moe,
    "qwen3_5_moe_text": Qwen35Moe,
    "qwen3_next": Qwen3Next,
    "deepseek_v2": DeepseekV2,
    "deepseek_v3": DeepseekV3,
    "kimi_k2": DeepseekV3,
    "glm4_moe_lite": Glm4MoeLite,
    "mistral4": Mistral4,
    "ernie4_5": Ernie45,
    "exaone4": Exaone4,
    "gemma": Gemma,
    "gemma2": Gemma2,
    "gemma3_text": Gemma3,
    "glm": Glm,
    "glm4": Glm4,
    "granite": Granite,
    "hunyuan_v1_dense": HunYuan,
    "internlm3": InternLm3,
    "olmo2": Olmo2,
    "olmo3": Olmo3,
    "phi3": Phi3,
    "seed_oss": SeedOss,
    "smollm3": SmolLm3,
    "starcoder2": Starcoder2,
    "arcee": Arcee,
    "nemotron": Nemotron,
    "mixtral": Mixtral,
    "qwen2_moe": Qwen2Moe,
    "qwen3_moe": Qwen3Moe,
    "olmoe": Olmoe,
    "ernie4_5_moe": Ernie45Moe,
    "gpt_oss": GptOss,
    "glm4_moe": Glm4Moe,
    "dots1": Dots1,
    "minimax_m2": MiniMaxM2,
    "granitemoe": GraniteMoe,
    "paddleocr_vl": PaddleOcrVl,
    "qwen2_5_vl": Qwen25Vl,
    "qwen3_vl": Qwen3Vl,
    "qwen3_vl_moe": Qwen3VlMoe,
}


def read_model(keys: Mapping[str, Any]) -> DecoderConfig:
    """Return the configuration of a model.

    `keys` is the parsed config.json. Raises ModelError if the model is not supported.
    """
    keys = text_part(keys)
    model_type = keys.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ModelError(
            f"config.json: model_type is {model_type!r}, supported are {', '.join([*FAMILIES, *TEXT_PARTS])}"
        )
    return FAMILIES[model_type].read(keys)
