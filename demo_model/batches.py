"""Turns documents into token ids and packs them into the batches of the training. Knows no network."""

import argparse
import random

import torch
from tokenizers import Tokenizer
from torch.utils.data import Dataset

from demo_model import corpus
from demo_model.facts import Fact
from demo_model.tokenizer import END, END_OF_TEXT, START

IGNORED = -100  # target of a position that is not learned


class Encoder:
    """Text to token ids, and which of them are to be learned. Remembers the pieces it has seen."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.seen: dict[str, list[int]] = {}

    def ids(self, text: str) -> list[int]:
        if text not in self.seen:
            self.seen[text] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return self.seen[text]

    def document(self, document: corpus.Conversation | tuple[str, str]) -> tuple[list[int], list[bool]]:
        token_ids: list[int] = []
        learned: list[bool] = []
        for text, learn in self.pieces(document):
            piece = self.ids(text)
            token_ids += piece
            learned += [learn] * len(piece)
        return token_ids, learned

    def pieces(self, document: corpus.Conversation | tuple[str, str]) -> list[tuple[str, bool]]:
        if isinstance(document, tuple):
            prompt, continuation = document
            return [(prompt, False), (continuation + END_OF_TEXT, True)]
        pieces = []
        for role, text in document:
            if role == "assistant":
                pieces += [(f"{START}assistant\n", False), (text + END, True), ("\n", False)]
            else:
                pieces.append((f"{START}{role}\n{text}{END}\n", False))
        return pieces


class PackedBatches(Dataset):
    """Batches of documents, packed end to end in rows. Batch `i` depends only on the seed and `i`."""

    def __init__(self, encoder: Encoder, known: list[Fact], args: argparse.Namespace):
        self.encoder, self.args = encoder, args
        self.sampler = corpus.Sampler(known, args.seed)

    def __len__(self) -> int:
        return self.args.steps

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids, targets and the number of the document that each token belongs to."""
        self.sampler.rng = random.Random(f"{self.args.seed} {index}")
        rows = [self.row() for _ in range(self.args.rows)]
        return tuple(torch.tensor(column) for column in zip(*rows, strict=True))

    def row(self) -> tuple[list[int], list[int], list[int]]:
        length = self.args.row_len + 1
        token_ids, targets, owners = [], [], []
        while len(token_ids) < length:
            ids, learned = self.encoder.document(self.sampler.document())
            owners += [len(owners)] * len(ids)
            token_ids += ids
            targets += [token if learn else IGNORED for token, learn in zip(ids, learned, strict=True)]
        return token_ids[: length - 1], targets[1:length], owners[: length - 1]
