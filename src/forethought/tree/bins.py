"""Best-fit packing of whole documents into sequences of a fixed length.

Each document, in the order given, goes to the open bin with the least room that still holds it (the oldest of equals),
or opens a new one. Documents are never split. Packed documents stay apart in `tree.pack`: positions restart, nothing
attends or predicts across a border.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from forethought.errors import ConfigError


def best_fit(lengths: Sequence[int], capacity: int) -> tuple[list[list[int]], list[int]]:
    """Bins of document indices, and the indices of documents that are longer than the capacity.

    Args:
        lengths: tokens of each document.
        capacity: tokens of a bin.

    >>> best_fit([5, 3, 4, 9], 8)
    ([[0, 1], [2]], [3])

    Raises:
        ConfigError: capacity below 1.
    """
    if capacity < 1:
        raise ConfigError(f"capacity={capacity}: a bin holds at least one token")
    bins: list[list[int]] = []
    dropped: list[int] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for index, length in enumerate(lengths):
        if length > capacity:
            dropped.append(index)
            continue
        place = bisect_left(room, (length, -1))
        if place < len(room):
            left, chosen = room.pop(place)
        else:
            left, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(index)
        insort(room, (left - length, chosen))
    return bins, dropped
