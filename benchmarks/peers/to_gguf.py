"""Conversion of the checkpoint for llama.cpp, in its environment: `python -m benchmarks.peers.to_gguf CHECKPOINT FORMAT
OUT`."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the bfloat16 tensors of a file as float32, under llama.cpp's names."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            file.seek(8 + size + start)
            bits = np.frombuffer(file.read(end - start), np.uint16).astype(np.uint32) << 16
            found = re.fullmatch(r"model\.(?:layers\.(\d+)\.)?(.+)\.(weight|bias)", name)
            assert found
            layer, part, leaf = found.groups()
            prefix = f"blk.{layer}." if layer else ""
            yield f"{prefix}{NAMES[part]}.{leaf}", bits.view(np.float32).reshape(entry["shape"])


def write_bf16(checkpoint: Path, out: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(out, config["model_type"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    add_vocabulary(writer, checkpoint, config)
    bf16 = gguf.GGMLQuantizationType.BF16
    for name, values in tensors(checkpoint / "model.safetensors"):
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, bf16), raw_dtype=bf16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: gguf.GGUFWriter, checkpoint: Path, config: dict) -> None:
    """Add the tokenizer's words, and made-up words for the ids beyond its vocabulary."""
    model = json.loads((checkpoint / "tokenizer.json").read_text())["model"]
    words = [f"<{index}>" for index in range(config["vocab_size"])]
    for word, index in model["vocab"].items():
        words[index] = word
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(words))
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def main(checkpoint: str, kind: str, out: str) -> None:
    if kind == "bf16":
        return write_bf16(Path(checkpoint), Path(out))
    whole = Path(out).with_name(f"{Path(checkpoint).name}-bf16.gguf")
    if not whole.exists():
        write_bf16(Path(checkpoint), whole)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    status = llama_cpp.llama_model_quantize(str(whole).encode(), out.encode(), params)
    assert status == 0, f"llama_model_quantize: {status}"


if __name__ == "__main__":
    main(*sys.argv[1:])
