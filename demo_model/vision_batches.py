"""Batches of conversations about pictures, as tensors, for the training of the model that reads images."""

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL.Image import Image
from tokenizers import AddedToken, Tokenizer
from torch import Tensor

from demo_model.pictures import Turn, conversation
from demo_model.vision_chat import VISION, pieces_of
from engine.images.processor import ImageProcessor

IGNORED = -100  # target of a position that is not learned
FONTS = ("DejaVuSans*", "DejaVuSerif*", "STIXGeneral*", "cmr10*", "cmb10*", "cmss10*", "cmtt10*")  # of matplotlib


class Batch(NamedTuple):
    """Conversations whose pictures have one size."""

    token_ids: Tensor  # i64 [rows, length]
    targets: Tensor  # i64 [rows, length]: the next token, or IGNORED
    pictures: Tensor  # u8 [pictures, height, width, 3]
    kinds: list[str]  # of the last question of each row


class Batches(torch.utils.data.IterableDataset):
    """Endless batches. Each worker process draws its own. In an exam only the last answer of a row is asked."""

    def __init__(self, tokenizer: Tokenizer, processor: ImageProcessor, seed: int, rows: int, is_exam: bool = False):
        self.seed, self.rows, self.is_exam = seed, rows, is_exam
        self.rng, self.processor, self.fonts = random.Random(seed), processor, matplotlib_fonts()
        self.tokenizer = tokenizer
        self.seen: dict[str, list[int]] = {}

    def __iter__(self) -> Iterator[Batch]:
        if worker := torch.utils.data.get_worker_info():
            self.rng.seed(f"{self.seed} {worker.id}")
        while True:
            yield self.next()

    def next(self) -> Batch:
        (height, width), num_turns = self.size(), self.rng.choice((1, 1, 2, 3))
        rows, pictures, kinds = [], [], []
        for _ in range(self.rows):
            turns = conversation(self.rng, num_turns, self.drawn_size(height, width), self.is_exam, self.fonts)
            rows.append(self.row(turns, height * width // self.processor.unit**2))
            pictures += [self.resized(turn.image, width, height) for turn in turns if turn.image]
            kinds.append(turns[-1].kind)
        length = max(len(token_ids) for token_ids, _ in rows)
        ids, targets = (torch.full((self.rows, length), fill) for fill in (0, IGNORED))
        for index, (token_ids, learned) in enumerate(rows):
            known = torch.tensor(token_ids)
            ids[index, : len(known)] = known
            targets[index, : len(known) - 1] = known[1:].where(torch.tensor(learned[1:]), IGNORED)
        return Batch(ids, targets, torch.from_numpy(np.stack(pictures)), kinds)

    def size(self) -> tuple[int, int]:
        """Return the height and width of the resized pictures of a batch."""
        aspect, kind = 1.0, self.rng.random()
        if kind > 0.5:
            aspect = math.exp(self.rng.uniform(0, math.log(4)) if kind < 0.85 else self.rng.uniform(-math.log(2.5), 0))
        side = 400 if self.rng.random() < 0.8 else self.rng.uniform(80, 112)
        return self.processor.size_of(round(side / math.sqrt(aspect)), round(side * math.sqrt(aspect)))

    def drawn_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of a picture before it is resized."""
        scale = math.exp(self.rng.uniform(-0.35, 0.6))
        drawn = [max(28, round(side * scale * self.rng.uniform(0.88, 1.14))) for side in (height, width)]
        fits = self.rng.random() < 0.4 and self.processor.size_of(*drawn) == (height, width)
        return (drawn[0], drawn[1]) if fits else (height, width)

    def resized(self, image: Image, width: int, height: int) -> np.ndarray:
        return np.asarray(image) if image.size == (width, height) else self.processor.resize(image)

    def row(self, turns: list[Turn], num_tokens: int) -> tuple[list[int], list[bool]]:
        """Return the token ids of a conversation, and which of them are learned."""
        token_ids: list[int] = []
        learned: list[bool] = []
        for index, turn in enumerate(turns):
            is_learned = not self.is_exam or index == len(turns) - 1
            pieces = pieces_of(turn, num_tokens, self.rng.random() < 0.8)
            for text, is_answer in zip(pieces, (False, is_learned, False), strict=True):
                token_ids += (piece := self.ids(text))
                learned += [is_answer] * len(piece)
        return token_ids, learned

    def ids(self, text: str) -> list[int]:
        if text not in self.seen:
            self.seen[text] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return self.seen[text]


def matplotlib_fonts() -> tuple[str, ...]:
    """Return the font files, or none without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return ()
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return tuple(
        str(path) for name in FONTS for path in sorted(folder.glob(f"{name}.ttf")) if "Display" not in path.name
    )


def tokenizer_of(path: Path) -> Tokenizer:
    """Return the tokenizer in a file with the tokens around pictures."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in VISION])
    return tokenizer
