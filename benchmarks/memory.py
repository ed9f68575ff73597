"""Peak memory of exporting and loading a model: `python -m benchmarks.memory --shape qwen3-moe-0.8b`.

Each step runs in a process of its own, whose memory is read every few milliseconds. `private` does not count the mapped
files of the checkpoint and the export, whose pages the system may drop at any time; `resident` does.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.random_checkpoint import SHAPES, make_checkpoint
from engine.exporting.export import QUANT_TYPES

LOAD = (
    "import sys; from pathlib import Path; from engine.executors import make_executor;"
    " from engine.settings.config import Config; make_executor(Path(sys.argv[1]), Config(device='cpu'))"
)
KINDS = ("RssAnon", "VmRSS")


def peaks(command: list[str]) -> list[int]:
    """Return the largest private and resident memory of a process in bytes."""
    process, most = (
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL),
        dict.fromkeys(KINDS, 0),
    )
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        with contextlib.suppress(OSError):
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
            for kind in KINDS:
                most[kind] = max(most[kind], 1024 * int(fields.get(kind, "0 kB").split()[0]))
        time.sleep(0.005)
    assert process.returncode == 0, command
    return list(most.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-moe-0.8b", choices=SHAPES)
    parser.add_argument("--quant-types", nargs="+", default=["none", "weight_only_int8", "weight_only_int4"],
                        choices=QUANT_TYPES)  # fmt: skip
    parser.add_argument("--work-dir", type=Path, default=Path("build/bench"), help="folder of the checkpoints")
    args = parser.parse_args()
    checkpoint = make_checkpoint(args.shape, args.work_dir / args.shape)
    print("quant type           stored MB   export: private  resident   load: private  resident")
    for quant_type in args.quant_types:
        with tempfile.TemporaryDirectory(dir=args.work_dir) as folder:
            out = Path(folder) / "out"
            command = [sys.executable, "-m", "engine.exporting", str(checkpoint), str(out), "--quant-type", quant_type]
            found = peaks(command)
            stored = sum(path.stat().st_size for path in out.glob("rank_*/*.pdiparams"))
            found += peaks([sys.executable, "-c", LOAD, str(out)])
        shown = [f"{size / 1e6:9.0f} ({size / stored:4.2f})" for size in found]
        print(f"{quant_type:20}{stored / 1e6:10.0f}  {'  '.join(shown)}", flush=True)


if __name__ == "__main__":
    main()
