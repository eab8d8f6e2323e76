"""What the benchmarks share: the model, prompts of an exact token length, the machine's floor, the last JSON line."""

from __future__ import annotations

import json
import os
import platform
import statistics
import threading
import time
from pathlib import Path

import numpy as np
import torch


def add_arguments(parser) -> None:
    parser.add_argument("--model", default="smollm2-135m-instruct", help="registry name, hub id or local folder")
    parser.add_argument("--peer", choices=("auto", "none"), default="auto", help="none: time ours alone")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="timed repetitions; the median is reported")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "both"), default="both")


def dtypes(choice: str) -> dict[str, torch.dtype]:
    every = {"bf16": torch.bfloat16, "fp32": torch.float32}
    return every if choice == "both" else {choice: every[choice]}


def word_prompts(tokenizer, count: int, length: int, seed: int = 0) -> list[str]:
    """Texts that the tokenizer encodes to exactly `length` tokens (single-token words, checked)."""
    rng = np.random.default_rng(seed)
    words = []
    for token in range(1000, 12000):
        text = tokenizer.decode([token])
        if text.startswith(" ") and text[1:].isalpha() and text.isascii():
            words.append(token)
    out = []
    while len(out) < count:
        ids = rng.choice(words, size=length).tolist()
        text = tokenizer.decode(ids)
        if tokenizer(text, add_special_tokens=False)["input_ids"] == ids:
            out.append(text)
    return out


def timed(function, repeats: int, warmup: int = 1) -> tuple[float, object]:
    """Median wall seconds of `repeats` calls after `warmup`, and the last result."""
    result = None
    for _ in range(warmup):
        result = function()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        result = function()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), result


class PeakMemory:
    """Highest resident memory (MiB) of this process while the block runs, sampled every 20 ms."""

    def __enter__(self):
        self.peak, self._stop = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self):
        page = os.sysconf("SC_PAGE_SIZE")
        while not self._stop.is_set():
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * page / 2**20
            self.peak = max(self.peak, resident)
            self._stop.wait(0.02)

    def __exit__(self, *exc):
        self._stop.set()
        self._thread.join()


def memory_bandwidth() -> float:
    """Bytes a second that this process can read (sum of a large array, best of 5)."""
    array = torch.ones(64 * 2**20)
    best = 0.0
    for _ in range(5):
        began = time.perf_counter()
        array.sum()
        best = max(best, array.numel() * 4 / (time.perf_counter() - began))
    return best


def matrix_rate(dtype: torch.dtype, rows: int) -> float:
    """Operations a second of [rows, 576] x [576, 1536] products (the model's shapes), best of 20."""
    a, b = torch.randn(rows, 576).to(dtype), torch.randn(1536, 576).to(dtype)
    best = 0.0
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(20):
            torch.nn.functional.linear(a, b)
        best = max(best, 20 * 2 * rows * 576 * 1536 / (time.perf_counter() - began))
    return best


def finish(result: dict) -> None:
    """The last line of a benchmark: one JSON object."""
    from forethought.rundir import versions

    result["machine"] = {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()}
    result["threads"] = torch.get_num_threads()
    result["versions"] = versions()
    print(json.dumps(result), flush=True)
