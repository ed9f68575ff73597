"""Exports a Hugging Face checkpoint: python -m engine.exporting CHECKPOINT OUT."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from engine.errors import SetupError
from engine.exporting.export import DTYPES, LOAD_FORMATS, QUANT_TYPES, ExportOptions, export
from engine.exporting.gguf_folder import as_checkpoint


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.exporting", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint_dir", type=Path, help="a folder, or a GGUF file")
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of weights and KV cache (%(default)s)")
    parser.add_argument("--quant-type", choices=QUANT_TYPES, default="none", help="of the weights (%(default)s)")
    parser.add_argument("--int8-cache", action="store_true", help="keys and values of 8 bits")
    parser.add_argument("--block-size", type=int, default=64, help="tokens a KV block (%(default)s)")
    parser.add_argument("--max-seq-len", type=int, help="tokens of prompt and answer (what the model is exact for)")
    parser.add_argument("--num-ranks", type=int, default=1, help="tensor-parallel ranks (%(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=(), help="that are written, those of one machine (all)")
    parser.add_argument("--expert-parallel", action="store_true", help="ranks have some experts each, not shares")
    parser.add_argument("--load-format", choices=LOAD_FORMATS, default="auto", help="dummy: without weights")
    parser.add_argument("--hf-overrides", default="", help="a JSON object: what config.json says instead")
    parser.add_argument("--mtp", action="store_true", help="with the layer that drafts (SPECULATE_METHOD=mtp)")
    parser.add_argument("--eagle3", default="", help="folder of an EAGLE-3 head (SPECULATE_METHOD=eagle3)")
    given = parser.parse_args(arguments)
    start = time.monotonic()

    def report(step: str) -> None:
        print(f"[{time.monotonic() - start:6.1f} s] {step}", flush=True)  # noqa: T201

    try:
        sizes = (given.block_size, given.max_seq_len, given.num_ranks)
        ranks, formats = tuple(given.ranks), (given.load_format, given.hf_overrides)
        options = ExportOptions(given.dtype, given.quant_type, *sizes, ranks, given.int8_cache, *formats)
        options = replace(options, mtp=given.mtp, eagle3=given.eagle3, expert_parallel=given.expert_parallel)
        with tempfile.TemporaryDirectory() as folder:
            export(as_checkpoint(given.checkpoint_dir, Path(folder)), given.out_dir, options, report)
    except (SetupError, OSError) as error:
        print(f"export failed: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
