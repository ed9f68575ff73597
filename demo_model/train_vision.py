"""Trains the demo model that reads images and writes it as a Hugging Face checkpoint of the family Qwen2.5-VL.

    pip install torch tokenizers safetensors pillow matplotlib
    python -m demo_model.train_vision --out demo_model/vision

It reads numbers and shapes in the pictures of `demo_model.pictures`, with the tokenizer of the demo model and the fonts
of Pillow and matplotlib. The training takes as long as it is told to. The figures are of the weights as they are saved,
in bfloat16, on pictures drawn from another seed: an answer is right only if every token of it is, to the end.
"""

import argparse
import copy
import json
import math
import os
import time
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from demo_model.network import Shape
from demo_model.vision_batches import IGNORED, Batch, Batches, tokenizer_of
from demo_model.vision_chat import TEMPLATE, VISION
from demo_model.vision_network import MROPE_SECTIONS, Qwen25VL, VisionShape
from engine.images.processor import CLIP_MEAN, CLIP_STD, ImageProcessor

SOURCE = Path(__file__).parent
PIXELS = {"min_pixels": 56 * 112, "max_pixels": 112 * 112}  # 8 to 16 tokens
TEXT = {"vocab_size": 2056, "hidden_size": 128, "intermediate_size": 352, "num_layers": 4, "num_heads": 4}
WARM_UP_STEPS = 300
NOISE = 6.0  # of 255


def normalized(pictures: Tensor) -> Tensor:
    mean, std = (torch.tensor(each, device=pictures.device) for each in (CLIP_MEAN, CLIP_STD))
    return (pictures.float() / 255 - mean) / std


def with_noise(pictures: Tensor) -> Tensor:
    """Return pictures u8 with noise of different strength, f32. Half of them have none."""
    strength = torch.rand(len(pictures), 1, 1, 1, device=pictures.device).mul(2 * NOISE).sub(NOISE).relu()
    return (pictures + strength * torch.randn(pictures.shape, device=pictures.device)).clamp(0, 255)


def train(model: Qwen25VL, batches: Batches, exam: list[Batch], args: argparse.Namespace) -> None:
    matrices = [each for each in model.parameters() if each.dim() > 1]
    vectors = [each for each in model.parameters() if each.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=True)
    loader = DataLoader(batches, batch_size=None, num_workers=args.workers, pin_memory=args.device == "cuda")
    drawn, step, waited, begin, reported = iter(loader), 0, 0.0, time.monotonic(), time.monotonic()
    while (passed := (now := time.monotonic()) - begin) < 60 * args.minutes:
        batch = next(drawn)
        waited += time.monotonic() - now
        rate = (
            args.lr
            * min(1, (step + 1) / WARM_UP_STEPS)
            * (0.01 + math.cos(passed / args.minutes / 60 * math.pi / 2) ** 2)
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(model, batch, args.device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % args.report_every == 0:
            print(f"step {step}  loss {loss.item():.4f}  {passed:.0f} s, {waited:.0f} s of it for pictures", flush=True)
        if now - reported > args.exam_every:
            reported = now
            report(model, exam, args)


def loss_of(model: Qwen25VL, batch: Batch, device: str) -> Tensor:
    token_ids, targets, pictures = (each.to(device, non_blocking=True) for each in batch[:3])
    learned = targets != IGNORED
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        hidden = model(token_ids, normalized(with_noise(pictures)))
        logits = model.logits(hidden[learned])
    return F.cross_entropy(logits.float(), targets[learned])


def report(model: Qwen25VL, exam: list[Batch], args: argparse.Namespace) -> None:
    """Save the weights, and print the share of right answers for each kind of question."""
    save(model, args.out)
    asked, right = sit(model, exam, args.device)
    shares = "  ".join(f"{kind} {right[kind] / asked[kind]:.1%}" for kind in sorted(asked))
    print(f"right of {asked.total()}: {right.total() / asked.total():.2%}  {shares}", flush=True)


@torch.no_grad()
def sit(model: Qwen25VL, exam: list[Batch], device: str) -> tuple[Counter[str], Counter[str]]:
    """Return how many questions of each kind were asked, and how many answers are right with weights in bfloat16."""
    saved = copy.deepcopy(model)
    for parameter in saved.parameters():
        parameter.copy_(parameter.bfloat16())
    asked, right = Counter[str](), Counter[str]()
    for batch in exam:
        token_ids, targets, pictures = (each.to(device) for each in batch[:3])
        chosen = saved.logits(saved(token_ids, normalized(pictures))).argmax(-1)
        is_right = ((chosen == targets) | (targets == IGNORED)).all(1).tolist()
        asked.update(batch.kinds)
        right.update(kind for kind, is_one in zip(batch.kinds, is_right, strict=True) if is_one)
    return asked, right


def save(model: Qwen25VL, out: Path) -> None:
    tensors = {name: each.detach().to("cpu", torch.bfloat16).contiguous() for name, each in model.named_parameters()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)


def config_of(tokenizer: Tokenizer, shape: Shape, vision: VisionShape) -> dict:
    """Return the parsed config.json."""
    start, pad, end = map(tokenizer.token_to_id, VISION)
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "bos_token_id": 0,
        "eos_token_id": 2,
        "hidden_size": shape.hidden_size,
        "image_token_id": pad,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": 1024,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_scaling": {"type": "mrope", "mrope_section": list(MROPE_SECTIONS)},
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vision_config": {
            "depth": vision.depth,
            "fullatt_block_indexes": list(range(vision.depth)),
            "hidden_size": vision.hidden_size,
            "intermediate_size": vision.intermediate_size,
            "num_heads": vision.num_heads,
            "out_hidden_size": shape.hidden_size,
            "patch_size": vision.patch_size,
            "spatial_merge_size": vision.merge_size,
            "temporal_patch_size": vision.num_frames,
            "window_size": 112,
        },
        "vision_end_token_id": end,
        "vision_start_token_id": start,
        "vocab_size": shape.vocab_size,
    }


def write_files(out: Path, tokenizer: Tokenizer, shape: Shape, vision: VisionShape) -> None:
    """Write all files but the weights."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = json.loads((SOURCE / "tokenizer_config.json").read_text())
    special = settings["added_tokens_decoder"]["0"]
    for text in VISION:
        settings["added_tokens_decoder"][str(tokenizer.token_to_id(text))] = {**special, "content": text}
    settings["chat_template"] = TEMPLATE
    own = {"patch_size": vision.patch_size, "temporal_patch_size": vision.num_frames, "merge_size": vision.merge_size}
    texts = {
        "config.json": config_of(tokenizer, shape, vision),
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessor", **PIXELS, **own},
        "tokenizer_config.json": settings,
        "generation_config.json": json.loads((SOURCE / "generation_config.json").read_text()),
        "special_tokens_map.json": json.loads((SOURCE / "special_tokens_map.json").read_text()),
    }
    for name, content in texts.items():
        (out / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--begin-with", type=Path, help="folder of a checkpoint; none: random weights")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--rows", type=int, default=512, help="conversations of a batch")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=0, help="of a CPU; 0: as many as there are cores")
    parser.add_argument(
        "--workers", type=int, default=min(14, os.cpu_count() or 1), help="processes that draw pictures"
    )
    parser.add_argument("--report-every", type=int, default=100, help="steps")
    parser.add_argument("--exam-every", type=float, default=40.0, help="seconds")
    parser.add_argument("--questions", type=int, default=8192, help="of the exam")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    if args.threads:
        torch.set_num_threads(args.threads)
    shape, vision, tokenizer = Shape(**TEXT, rope_theta=1e4), VisionShape(), tokenizer_of(SOURCE / "tokenizer.json")
    write_files(args.out, tokenizer, shape, vision)
    processor = ImageProcessor.read(args.out)
    assert processor
    examiner = Batches(tokenizer, processor, args.seed + 1, 256, is_exam=True)
    print(f"{len(examiner.fonts)} fonts beside Pillow's", flush=True)
    exam = [examiner.next() for _ in range(args.questions // 256)]
    model = Qwen25VL(shape, vision, tokenizer.token_to_id(VISION[1])).to(args.device)
    if args.begin_with:
        model.load_state_dict(load_file(args.begin_with / "model.safetensors"))
    print(f"{sum(each.numel() for each in model.parameters()) / 1e6:.2f} million parameters", flush=True)
    train(model, Batches(tokenizer, processor, args.seed, args.rows), exam, args)
    report(model, exam, args)


if __name__ == "__main__":
    main()
