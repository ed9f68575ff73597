"""Selection of the sampling fields that a step sends to the device: no neutral fields, and no entries of other
slots."""

from __future__ import annotations

import numpy as np

from engine.ops.sampling_rows import SamplingRows
from engine.sampling_parameters import PARAMETERS, PENALTIES

CAPTURED = tuple(each.name for each in PARAMETERS if each.is_captured)  # read for every sampled token
ALWAYS = (*CAPTURED, "seed", "counter")
RARE = tuple(each for each in PARAMETERS if not each.is_captured and not each.is_penalty)
SEEN = ("seen_ids", "seen_counts")
BIASES = ("bias_starts", "bias_ids", "bias")


def fields_to_send(rows: SamplingRows) -> dict[str, np.ndarray]:
    """Return the fields for `engine.ops.cuda.sampler.sample`, by name. The mask is not included, because it arrives
    later."""
    names = [*ALWAYS, *(BIASES if len(rows.bias_ids) else ())]
    if rows.num_logprobs.max() >= 0:
        names.append("num_logprobs")
    fields = {name: getattr(rows, name) for name in names}
    columns = {each.name: (getattr(rows, each.name), each.neutral) for each in RARE}
    fields |= {name: column for name, (column, neutral) in columns.items() if (column != neutral).any()}
    lengths = rows.seen_ends - rows.seen_starts
    if lengths.any():
        ends = np.cumsum(lengths, dtype=np.int32)
        parts = [slice(start, end) for start, end in zip(rows.seen_starts, rows.seen_ends, strict=True)]
        fields |= {each.name: getattr(rows, each.name) for each in PENALTIES}
        fields |= {"seen_starts": ends - lengths, "seen_ends": ends}
        fields |= {name: np.concatenate([getattr(rows, name)[part] for part in parts]) for name in SEEN}
    return fields
