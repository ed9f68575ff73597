"""Runs an exported graph the way an executor does: prompts in chunks, then one token a step, out of a paged cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from engine.core.cache_groups import STATE, table_name
from engine.dtypes import held_as
from engine.exporting.manifest import Manifest, rank_dir
from engine.graph import Graph, load
from engine.graph.run import run_graph
from engine.models.kv_cache import CacheSpec
from engine.models.layers import EMBEDDING_ROWS, POSITIONS, SPAN_EMBEDDINGS
from engine.ops import reference
from engine.ops.cpu.paddle_ops import register_paddle_ops

Run = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]  # a step's inputs to its outputs


class PagedModel:
    """A few requests over one pool. Their blocks are shuffled, so that a table read wrongly shows."""

    def __init__(self, graph: Graph, model: Manifest, run: Run, num_requests: int = 1, num_blocks: int = 12):
        groups = model.graph().cache_groups
        num_groups, num_blocks = len(groups), max(num_blocks, *(group.num_parts for group in groups))
        self._widths = [group.num_parts if group.kind == STATE else num_blocks for group in groups]
        self.caches = make_caches(model.graph().caches, num_groups * num_requests * num_blocks)
        self.block_size = model.block_size
        pool = np.random.default_rng(0).permutation(num_groups * num_requests * num_blocks).astype(np.int32)
        self.block_tables = pool.reshape(num_groups, num_requests, num_blocks)
        self.context_lens = [0] * num_requests
        self._spans = graph.inputs.get(SPAN_EMBEDDINGS)
        self._run = run

    @classmethod
    def of(cls, model_dir: Path, ops=reference, rank: int = 0, **sizes) -> PagedModel:
        graph, stored = load(model_dir, rank)
        params = {name: np.asarray(each) for name, each in stored.items()}
        return cls(graph, Manifest.read(model_dir), lambda inputs: run_graph(graph, params, inputs, ops), **sizes)

    @classmethod
    def through_paddle(cls, model_dir: Path, rank: int = 0) -> PagedModel:
        """Run the same files with Paddle Inference, with caches that it shares with us."""
        import paddle
        from paddle import inference

        register_paddle_ops()
        manifest = Manifest.read(model_dir)
        graph, directory = manifest.graph(), rank_dir(model_dir, rank)
        config = inference.Config(str(directory / graph.program), str(directory / graph.parameters))
        config.disable_gpu()
        config.disable_glog_info()
        predictor = inference.create_predictor(config)

        def run(inputs) -> dict[str, np.ndarray]:
            for name, array in inputs.items():
                handle = predictor.get_input_handle(name)
                if name in caches:
                    handle.share_external_data(caches[name])
                else:
                    handle.reshape(array.shape)
                    handle.copy_from_cpu(array)
            predictor.run()
            outputs = zip(graph.outputs, predictor.get_output_names(), strict=True)
            return {name: predictor.get_output_handle(theirs).copy_to_cpu() for name, theirs in outputs}

        model = cls(load(model_dir, rank)[0], manifest, run)
        caches = {name: paddle.to_tensor(array) for name, array in model.caches.items()}
        return model

    def step(self, tokens: dict[int, list[int]], num_logits: int = 1) -> np.ndarray:
        """Compute the next tokens of some requests. Return the logits of the last `num_logits` tokens of each."""
        requests, counts = list(tokens), [len(ids) for ids in tokens.values()]
        starts = np.cumsum([0, *counts])
        contexts = [self.context_lens[request] for request in requests]
        positions = [np.arange(c, c + n) for c, n in zip(contexts, counts, strict=True)]
        assert max(map(max, positions)) < self.block_tables.shape[2] * self.block_size, "the cache is too small"
        rows = [np.arange(end - num_logits, end) for end in starts[1:]]
        inputs = {
            "token_ids": np.concatenate(list(tokens.values())),
            "positions": np.concatenate(positions),
            "query_starts": starts,
            "context_lens": np.array(contexts),
            **{
                table_name(group): tables[requests, : self._widths[group]]
                for group, tables in enumerate(self.block_tables)
            },
            "logit_rows": np.concatenate(rows),
        }
        for request, count in zip(requests, counts, strict=True):
            self.context_lens[request] += count
        arrays = {name: array.astype(np.int32) for name, array in inputs.items()}
        if self._spans:  # text alone, whose three positions are equal
            arrays[POSITIONS] = np.tile(arrays[POSITIONS], (3, 1))
            arrays[EMBEDDING_ROWS] = np.full(starts[-1], -1, np.int32)
            arrays[SPAN_EMBEDDINGS] = np.zeros((0, self._spans.shape[1]), np.float32)
        return self._run(arrays | self.caches)["logits"]

    def prefill(self, prompt: list[int], chunk: int, num_logits: int = 1) -> np.ndarray:
        """Process the first request's prompt, `chunk` tokens a step. Return the logits of its last tokens."""
        for start in range(0, len(prompt), chunk):
            logits = self.step({0: prompt[start : start + chunk]}, min(num_logits, len(prompt) - start))
        return logits

    def greedy(self, prompt: list[int], count: int, chunk: int = 1000) -> list[int]:
        token_ids = [int(self.prefill(prompt, chunk)[-1].argmax())]
        while len(token_ids) < count:
            token_ids.append(int(self.step({0: token_ids[-1:]})[-1].argmax()))
        return token_ids


def make_caches(specs: Iterable[CacheSpec], num_blocks: int) -> dict[str, np.ndarray]:
    """Return caches that are full of NaN, because what was not written must not be read."""
    caches = {}
    for spec in specs:
        nan = {"bfloat16": 0x7FC0, "int8": -1}.get(spec.dtype, np.nan)  # two bytes of -1 are a scale that is none
        caches[spec.name] = np.full(spec.shape_of(num_blocks), nan, held_as(spec.dtype))
    return caches
