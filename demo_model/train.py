"""Trains the demo model from nothing and writes it as a Hugging Face checkpoint.

    python -m demo_model.train --out demo_model
    python -m demo_model.train --draft-of demo_model --out demo_model/draft \
        --rows 8 --row-len 384 --steps 1500 --lr 3e-3

The second command trains the draft model (SPECULATE_METHOD=draft) with the tokenizer of the demo model, on the same
texts. It is far smaller, and its embeddings begin as the principal components of the demo model's.

Everything is drawn from one seed. The figures at the end are of the weights as they are saved, in bfloat16.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.nn import functional as F
from torch.utils.data import DataLoader

from demo_model import corpus
from demo_model.batches import IGNORED, Encoder, PackedBatches
from demo_model.exam import exam_papers, report, sit_exam
from demo_model.network import Qwen2, Shape
from demo_model.tokenizer import MAX_LEN, train_tokenizer, write_json, write_tokenizer

WARM_UP_STEPS = 200
WEIGHT_DECAY = 0.1
DRAFT = {"hidden_size": 96, "intermediate_size": 256, "num_layers": 2, "num_heads": 3, "num_kv_heads": 1}


def train(model: Qwen2, batches: DataLoader, args: argparse.Namespace) -> None:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    on_gpu = args.device == "cuda"
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=on_gpu)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=min(WARM_UP_STEPS, args.steps // 2))
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps - warm_up.total_iters)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [warm_up.total_iters])
    forward = torch.compile(model) if args.compile else model
    causal = torch.ones(args.row_len, args.row_len, dtype=torch.bool, device=args.device).tril()
    torch.set_float32_matmul_precision("high")
    begin = time.monotonic()
    for step, batch in enumerate(batches, 1):
        token_ids, targets, owners = (part.to(args.device, non_blocking=True) for part in batch)
        mask = (owners[:, :, None] == owners[:, None, :]) & causal  # a document sees only itself
        learned = targets != IGNORED
        with torch.autocast(args.device, torch.bfloat16, enabled=on_gpu):
            hidden = forward(token_ids, mask[:, None])
        loss = F.cross_entropy(model.logits(hidden[learned].float()), targets[learned])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step % args.report_every == 0 or step == args.steps:
            passed = time.monotonic() - begin
            rate = step * token_ids.numel() / passed
            print(
                f"step {step:>5}/{args.steps}  loss {loss.item():.5f}  {rate:9.0f} tok/s  {passed:6.1f} s", flush=True
            )


def write_model(model: Qwen2, out: Path) -> None:
    weights = {name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in model.named_parameters()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    shape = model.shape
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": MAX_LEN,
        "model_type": "qwen2",
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocab_size,
    }
    write_json(out / "config.json", config)
    # both end an answer: the first one a turn of a chat, the second one a text without a chat template
    generation = {"bos_token_id": 0, "do_sample": False, "eos_token_id": [2, 0], "pad_token_id": 0}
    write_json(out / "generation_config.json", generation)


def principal_components(model_dir: Path, width: int) -> torch.Tensor:
    """Return the embeddings of a model, reduced to `width` dimensions and scaled as those that training begins with."""
    table = load_file(model_dir / "model.safetensors")["model.embed_tokens.weight"].float()
    left, values, _ = torch.linalg.svd(table, full_matrices=False)
    reduced = left[:, :width] * values[:width]
    return reduced * (0.03 / reduced.std())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--draft-of", type=Path, help="train a draft model for the model in this folder")
    parser.add_argument("--reports", type=Path, help="folder for the wrong answers of the exam; none: not written")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--rows", type=int, default=64, help="rows of a batch")
    parser.add_argument("--row-len", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1), help="processes that draw batches")
    parser.add_argument("--report-every", type=int, default=100)
    parser.add_argument("--exam-every", type=int, default=1, help="ask only every n-th question of the exam")
    parser.add_argument("--compile", action="store_true", help="compile the network first")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    begin = time.monotonic()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    known = corpus.all_facts()
    if args.draft_of:
        tokenizer, sizes = Tokenizer.from_file(str(args.draft_of / "tokenizer.json")), DRAFT
    else:
        tokenizer, sizes = train_tokenizer(known), {}
    write_tokenizer(tokenizer, args.out)
    encoder = Encoder(tokenizer)
    model = Qwen2(Shape(vocab_size=tokenizer.get_vocab_size(), **sizes)).to(args.device)
    if args.draft_of:
        with torch.no_grad():
            model.model.embed_tokens.weight.copy_(principal_components(args.draft_of, DRAFT["hidden_size"]))
    size = sum(p.numel() for p in model.parameters())
    print(f"{len(known)} facts, {tokenizer.get_vocab_size()} tokens, {size} parameters")
    batches = DataLoader(
        PackedBatches(encoder, known, args), batch_size=None, num_workers=args.workers, pin_memory=args.device == "cuda"
    )
    train(model, batches, args)
    write_model(model, args.out)
    torch.set_float32_matmul_precision("highest")
    model.to(torch.bfloat16)  # what is asked is what is saved
    papers = {topic: documents[:: args.exam_every] for topic, documents in exam_papers(known).items()}
    report("bfloat16 arithmetic", sit_exam(model, encoder, papers, args.device), args.reports)
    model.float()
    report("float32 arithmetic, weights as saved", sit_exam(model, encoder, papers, args.device), args.reports)
    print(f"all in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
