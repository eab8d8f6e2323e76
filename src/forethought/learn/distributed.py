"""Data parallelism through accelerate's process group.

Every process holds the whole model and its own share of the trees. Loss coefficients are global (each process asks for
global totals), so summing the gradients gives exactly the step of one process that holds all trees. Sharded parameters
(FSDP2) are not wired up.

A process that fails alone would leave the others waiting in their next sum for ever. So work that may fail is done
inside `together()`, which ends in an error on every process if it did on one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from forethought import errors


class Distributed:
    """World size, rank and sums over processes. One process without a launcher needs no process group."""

    def __init__(self):
        self.world, self.rank = 1, 0
        self._state: Any = None
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from accelerate import PartialState

            self._state = PartialState(cpu=not torch.cuda.is_available())
            self.world, self.rank = self._state.num_processes, self._state.process_index

    @property
    def main(self) -> bool:
        return self.rank == 0

    def share(self, items: list) -> list:
        """This process's part of a list, dealt out in turn."""
        return items[self.rank :: self.world]

    # -- collective: every process must call these, in the same order --
    def sum(self, value: float) -> float:
        """Sum of a number over all processes."""
        if self.world == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.float64, device=self._device())
        torch.distributed.all_reduce(tensor)
        return float(tensor)

    def gather(self, value: Any) -> list[Any]:
        """Every process's value (anything that can be pickled), by rank."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(found, value)
        return found

    def sum_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        """Add up the gradients of all processes, in place.

        A process without a gradient where another one has one takes part with zeros. A parameter without a gradient
        anywhere keeps none, so that the optimiser leaves it alone as it does in one process.
        """
        if self.world == 1:
            return
        present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=self._device())
        torch.distributed.all_reduce(present)
        for parameter, count in zip(parameters, present.tolist(), strict=True):
            if not count:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            torch.distributed.all_reduce(parameter.grad)

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Process 0's values into the tensors of all processes, in place."""
        if self.world > 1:
            for tensor in tensors:
                torch.distributed.broadcast(tensor.detach(), 0)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Work without collective calls that may fail: all processes leave it, or all of them raise.

        A process that failed raises its own error. The others raise one of the same kind (a ForethoughtError where the
        kind is not one of this package's, or FloatingPointError) that names the process.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        if self.world > 1 and self.sum(float(error is not None)):
            for rank, told in enumerate(self.gather(_told(error))):
                if told is not None and error is None:
                    error = getattr(errors, told[0], FloatingPointError)(f"process {rank}: {told[1]}")
        if error is not None:
            raise error

    def barrier(self) -> None:
        if self._state is not None:
            self._state.wait_for_everyone()

    def _device(self) -> torch.device:
        return self._state.device if self._state is not None else torch.device("cpu")


def _told(error: Exception | None) -> tuple[str, str] | None:
    """Kind and message, for other processes; never an object that may fail to be pickled."""
    if error is None:
        return None
    for kind in type(error).__mro__:
        if kind is FloatingPointError or getattr(errors, kind.__name__, None) is kind:
            return kind.__name__, str(error)
    return "ForethoughtError", f"{type(error).__name__}: {error}"
