"""Numbers of experts on a GPU and in the host's memory (EXPERTS_ON_HOST). Independent of tensors."""

from __future__ import annotations

from typing import NamedTuple

from engine.errors import ConfigError


class ExpertSizes(NamedTuple):
    """Experts of one rank."""

    num_layers: int  # layers that have experts
    num_experts: int  # of a layer
    num_bytes: int  # of the matrices of all of them, without scales

    def numbers_on_host(self, max_bytes: int) -> list[int]:
        """Return how many experts of each layer are on the host, which keeps at most `max_bytes`. Raises
        ConfigError."""
        if not self.num_layers:
            raise ConfigError("EXPERTS_ON_HOST is set, but the model has no experts; set it to 0")
        total = self.num_layers * self.num_experts
        count = min(total, max_bytes * total // self.num_bytes)
        if not count:
            raise ConfigError(
                f"EXPERTS_ON_HOST is {max_bytes / 2**30:.2g} GiB per rank, it must be 0 or at least"
                f" {self.num_bytes / total / 2**30:.2g}, the size of one expert"
            )
        ends = [count * number // self.num_layers for number in range(self.num_layers + 1)]
        return [end - start for start, end in zip(ends, ends[1:], strict=False)]

    def host_bytes(self, max_bytes: int) -> int:
        """Return the bytes of the experts on the host."""
        return sum(self.numbers_on_host(max_bytes)) * self.num_bytes // (self.num_layers * self.num_experts)

    def stage_bytes(self, max_bytes: int) -> int:
        """Return the memory on the device to which the experts of one layer are copied for long steps."""
        return max(self.numbers_on_host(max_bytes)) * self.num_bytes // (self.num_layers * self.num_experts)
