"""Asks a trained model everything that it was trained on, and counts the right answers. Knows no training."""

from collections import defaultdict
from pathlib import Path

import torch

from demo_model.batches import Encoder
from demo_model.corpus import WORD_FOR_WORD, Conversation, Sampler, variants
from demo_model.facts import Fact, rows, ways
from demo_model.network import Qwen2
from demo_model.prose import UNKNOWN_NAME
from demo_model.tokenizer import write_json

BATCH_TOKENS = 1 << 17
MAX_REPORTED = 50  # wrong answers a topic that are written down


def exam_papers(known: list[Fact]) -> dict[str, list[Conversation | tuple[str, str]]]:
    """Everything that the model is asked after the training, by topic. Long, but complete."""
    papers: dict[str, list] = defaultdict(list)
    for fact in known:
        for question in fact.questions:
            for variant in variants(question):
                papers[fact.topic].append([("user", variant), ("assistant", fact.answer)])
        if fact.short is not None:
            system = ("system", "Answer in one word.")
            papers["one word"].append([system, ("user", fact.questions[0]), ("assistant", fact.short)])
    sampler = Sampler(known, seed=-1, noise=0.0)
    papers["multi-turn"] = [talk for talk in (sampler.conversation() for _ in range(20000)) if len(talk) > 2]
    for questions, answer in rows(UNKNOWN_NAME):
        papers["not told"] += [[("user", question), ("assistant", answer)] for question in ways(questions)]
    papers["raw text"] = list(sampler.raw)
    papers["nonsense"] = [sampler.nonsense()[-2:] for _ in range(2000)]
    careless_sampler = Sampler(known, seed=-2, noise=1.0)
    papers["careless"] = [careless_sampler.exchange(fact) for fact in known if fact.topic not in WORD_FOR_WORD]
    return papers


@torch.inference_mode()
def sit_exam(model: Qwen2, encoder: Encoder, papers: dict[str, list], device: str) -> dict[str, dict]:
    """Per topic: answers that greedy decoding gets exactly right, to the token that ends them.

    One pass over question and answer shows it: greedy decoding writes the answer exactly if every token
    of it is the most probable one after those before it.
    """
    marks = {}
    for topic, documents in papers.items():
        encoded = sorted((encoder.document(document) for document in documents), key=lambda pair: len(pair[0]))
        wrong, margins = [], []
        while encoded:
            size = max(1, BATCH_TOKENS // len(encoded[-1][0]))
            batch, encoded = encoded[-size:], encoded[:-size]
            right, margin = grade(model, batch, device)
            wrong += [
                encoder.tokenizer.decode(ids, skip_special_tokens=False)
                for (ids, _), ok in zip(batch, right, strict=True)
                if not ok
            ]
            margins += margin
        marks[topic] = {
            "asked": len(documents),
            "right": len(documents) - len(wrong),
            "margin": min(margins),
            "wrong": wrong,
        }
    return marks


def grade(model: Qwen2, batch: list[tuple[list[int], list[bool]]], device: str) -> tuple[list[bool], list[float]]:
    """Return, for each document, whether every learned token is the first choice, and the smallest margin in logits."""
    longest = max(len(ids) for ids, _ in batch)
    token_ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in batch], device=device)
    learned = torch.tensor([flags + [False] * (longest - len(flags)) for _, flags in batch], device=device)[:, 1:]
    logits = model.logits(model(token_ids)[:, :-1][learned]).float()
    answer = token_ids[:, 1:][learned]
    own = logits.gather(1, answer[:, None]).squeeze(1)
    best_other = logits.scatter(1, answer[:, None], -torch.inf).amax(1)
    margin = torch.full(learned.shape, torch.inf, device=device)
    margin[learned] = own - best_other
    margin = margin.amin(1).tolist()
    return [least > 0 for least in margin], margin


def report(title: str, marks: dict[str, dict], out: Path | None) -> None:
    print(title)
    for topic, mark in marks.items():
        print(f"  {topic:<12} {mark['right']:>7} of {mark['asked']:>7}   least margin {mark['margin']:7.3f}")
    right, asked = (sum(mark[key] for mark in marks.values()) for key in ("right", "asked"))
    print(f"  {'all':<12} {right:>7} of {asked:>7}   {right / asked:.4%}", flush=True)
    if out is not None:
        wrong = {topic: mark["wrong"][:MAX_REPORTED] for topic, mark in marks.items() if mark["wrong"]}
        write_json(out / f"wrong_{title.split()[0]}.json", wrong)
