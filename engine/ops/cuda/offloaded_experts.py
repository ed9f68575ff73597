"""Matrices of experts of which a part is in pinned memory of the host (EXPERTS_ON_HOST).

The kernels of experts.py find the matrix of an expert by a table on the device, so that they compute the same wherever
it is. Steps of few tokens read the matrices of missing experts over the bus, in place. Longer steps, which need nearly
all experts and read them several times, copy those of a matrix to a stage on the device, while the matrix before is
multiplied. Independent of graphs and of the choice of the experts on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

IN_PLACE = 64  # tokens of a step up to which host memory is read in place
UNIT = 64  # the entries of a table are multiples of so many numbers, if possible: the compiler must know the alignment


class OffloadedMatrix:
    """Matrix of all experts of a layer, [E * N, ...], which ops take in place of a tensor.

    `tensor` has the rows of some of the experts on the device, `on_host` are the pinned tensors of the others.
    `experts` are those of the places on the device, then of the host.
    """

    def __init__(self, tensor: Tensor, on_host: Sequence[Tensor], experts: Sequence[int]):
        num_rows, self.tensor = len(on_host[0]), tensor
        self.num_rows = num_rows * len(experts)
        self.on_device = [tensor[start : start + num_rows] for start in range(0, len(tensor), num_rows)]
        self.on_host, self.experts = on_host, list(experts)
        self.expert_bytes, self.host_bytes = on_host[0].nbytes, sum(part.nbytes for part in on_host)
        self._base, self._item = tensor.data_ptr(), tensor.element_size()
        self._tables = [torch.empty(len(experts), dtype=torch.int64, device=tensor.device) for _ in range(2)]

    def stage_in(self, stage: Stage, index: int) -> None:
        """Become the matrix with this index of the stage."""
        self._stage, self._index = stage, index
        distances = [address - self._base for address in (stage.address(index), *map(Tensor.data_ptr, self.on_host))]
        self.unit = math.gcd(UNIT * self._item, self.expert_bytes, *distances) // self._item  # 1 at least
        self.fill_tables()

    def fill_tables(self) -> None:
        """Write the distance of each expert's matrix from where it would be if all were stacked on the device, first
        with those of the host in place, then with those of the host on the stage."""
        stage = self._stage.address(self._index)
        places = [
            [part.data_ptr() for part in self.on_host],
            [stage + place * self.expert_bytes for place in range(len(self.on_host))],
        ]
        for table, of_host in zip(self._tables, places, strict=True):
            distances = [0] * len(self.experts)
            addresses = [part.data_ptr() for part in self.on_device] + of_host
            for expert, address in zip(self.experts, addresses, strict=True):
                distances[expert] = (address - self._base - expert * self.expert_bytes) // (self._item * self.unit)
            table.copy_(torch.tensor(distances))

    def table_for(self, topk_ids: Tensor) -> Tensor:
        """Return the table for a step with these experts [T, top_k], after bringing the experts onto the stage if the
        step is long."""
        if len(topk_ids) > IN_PLACE:
            self._stage.fetch(self._index)
            return self._tables[1]
        return self._tables[0]


class Stage:
    """Two buffers on the device for the experts of successive matrices, and the stream that copies to them."""

    def __init__(self, matrices: Sequence[OffloadedMatrix], device: torch.device):
        self._matrices = matrices
        self._module = torch.get_device_module(device)  # on the CPU its streams do nothing
        self._stream = self._module.Stream()
        sizes = [max(matrix.host_bytes for matrix in matrices[start::2]) for start in range(2)]
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        self._held: list[int | None] = [None, None]
        for index, matrix in enumerate(matrices):
            matrix.stage_in(self, index)

    def address(self, index: int) -> int:
        """Return the address of the first expert on the host of a matrix, when it is on the stage."""
        return self._buffers[index % 2].data_ptr()

    def fetch(self, index: int) -> None:
        """Let the current stream wait for the experts of a matrix, and start the copy of the next one."""
        self._start(index)
        self._module.current_stream().wait_stream(self._stream)
        if index + 1 < len(self._matrices):
            self._start(index + 1)

    def swap(self, index: int, place: int, host_place: int) -> None:
        """Let an expert on the device and one on the host change places. Later steps use the new ones."""
        matrix, main = self._matrices[index], self._module.current_stream()
        main.wait_stream(self._stream)
        self._held = [None, None]
        on_device, on_host = matrix.on_device[place], matrix.on_host[host_place]
        spare = self._buffers[index % 2][: on_host.nbytes].view(on_host.dtype).view(on_host.shape)
        spare.copy_(on_host, non_blocking=True)
        on_host.copy_(on_device, non_blocking=True)
        on_device.copy_(spare)
        other = len(matrix.on_device) + host_place
        matrix.experts[place], matrix.experts[other] = matrix.experts[other], matrix.experts[place]
        matrix.fill_tables()

    def _start(self, index: int) -> None:
        """Start the copy of the experts of a matrix, unless the stage has them."""
        side, start = index % 2, 0
        if self._held[side] == index:
            return
        self._held[side] = index
        self._stream.wait_stream(self._module.current_stream())  # it has launched everything that reads the buffer
        with self._module.stream(self._stream):
            for part in self._matrices[index].on_host:
                rows = self._buffers[side][start : start + part.nbytes]
                rows.copy_(part.view(torch.uint8).view(-1), non_blocking=True)
                start += part.nbytes
