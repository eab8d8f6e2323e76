"""Data parallelism through accelerate's process group.

Every process holds the whole model and its own share of the trees. Loss coefficients are global (each process asks for
global totals), so summing the gradients gives exactly the step of one process that holds all trees. Sharded parameters
(FSDP2) are not wired up.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch


class Distributed:
    """World size, rank and sums over processes. One process without a launcher needs no process group."""

    def __init__(self):
        self.world, self.rank = 1, 0
        self._state = None
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from accelerate import PartialState

            self._state = PartialState(cpu=not torch.cuda.is_available())
            self.world, self.rank = self._state.num_processes, self._state.process_index

    @property
    def main(self) -> bool:
        return self.rank == 0

    def sum(self, value: float) -> float:
        """Sum of a number over all processes."""
        if self.world == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.float64, device=self._device())
        torch.distributed.all_reduce(tensor)
        return float(tensor)

    def sum_gradients(self, gradients: Iterable[torch.Tensor]) -> None:
        """Add the gradients of all processes, in place."""
        if self.world > 1:
            for grad in gradients:
                torch.distributed.all_reduce(grad)

    def share(self, items: list) -> list:
        """This process's part of a list, dealt out in turn."""
        return items[self.rank :: self.world]

    def barrier(self) -> None:
        if self._state is not None:
            self._state.wait_for_everyone()

    def _device(self) -> torch.device:
        return self._state.device if self._state is not None else torch.device("cpu")
