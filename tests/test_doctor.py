"""The bug report: complete, plain, without private names, and not stopped by what is broken."""

from __future__ import annotations

import getpass
import json
import os
import platform
import socket
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from forethought import doctor
from forethought.doctor import EXTRAS, collect, render

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


@pytest.fixture(scope="module")
def info() -> dict:
    return collect()


def test_it_holds_what_a_bug_report_needs(info):
    torch = pytest.importorskip("torch")
    assert list(info) == ["versions", "packages", "system", "cpu", "memory", "disk", "torch", "extras"]
    assert json.loads(json.dumps(info, allow_nan=False)) == info
    assert info["versions"]["numpy"] == np.__version__ and info["packages"]["pyyaml"] == metadata.version("pyyaml")
    assert info["system"]["python"].startswith(platform.python_version())
    assert info["cpu"]["cores"] == os.cpu_count()
    assert 0.1 < info["memory"]["total_gib"] < 1e5
    assert info["torch"]["version"] == torch.__version__
    assert info["torch"]["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert info["torch"]["cpu_bf16"] == [n for n in ("avx512_bf16", "amx_bf16") if torch.cpu.get_capabilities().get(n)]
    assert len(info["torch"]["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert not any("error" in part for part in info.values())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_and_processor_are_read_from_the_kernel(monkeypatch):
    files = {
        "/proc/meminfo": "MemTotal:  33554432 kB\nMemAvailable:  1048576 kB\n",
        "/sys/fs/cgroup/memory.max": f"{8 * 2**30}\n",
        "/proc/cpuinfo": "processor : 0\nmodel name : Some: CPU\nflags : fpu avx2 amx_bf16 amx_tile\n\n"
        "processor : 1\nmodel name : Other\nflags : fpu\n",
    }
    monkeypatch.setattr(doctor, "_read", lambda path: files.get(path, ""))
    assert doctor._memory() == {"total_gib": 32.0, "available_gib": 1.0, "limit_gib": 8.0}
    cpu = doctor._cpu()
    assert cpu["model"] == "Some: CPU" and cpu["flags"] == ["avx2", "amx_tile", "amx_bf16"]
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert doctor._memory()["limit_gib"] is None
    files.clear()
    assert doctor._memory()["total_gib"] > 0.1 and doctor._cpu()["flags"] == []


def test_it_tells_no_private_names(info):
    text = render(info) + json.dumps(info)
    for name in (str(Path.home()), os.getcwd(), sys.prefix, str(Path(doctor.__file__).parent)):
        assert name not in text
    host = socket.gethostname()
    assert len(host) < 4 or host not in text
    assert len(getpass.getuser()) < 5 or getpass.getuser() not in text


def test_extras_are_those_of_the_package(info):
    if not PROJECT.is_file():
        pytest.skip("no pyproject.toml beside the tests")
    declared = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    names = {
        extra: tuple(p.split(">")[0].split("<")[0].strip() for p in packages) for extra, packages in declared.items()
    }
    assert {extra: names[extra] for extra in names if extra != "dev"} == EXTRAS
    assert set(info["extras"]) == set(EXTRAS)


def test_absent_extras_say_what_to_install(monkeypatch):
    def version(name):
        if name == "trl":
            raise metadata.PackageNotFoundError(name)
        return "1.2.3"

    monkeypatch.setattr(doctor.metadata, "version", version)
    text = render({"extras": collect()["extras"]})
    assert "  trl              missing trl: pip install 'forethought[trl]'" in text.splitlines()
    assert "  peft             peft 1.2.3" in text.splitlines()


def test_what_is_broken_is_reported_and_the_rest_is_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    info = collect()
    assert info["torch"]["error"].startswith("ModuleNotFoundError: ")
    assert info["cpu"]["cores"] == os.cpu_count()
    assert "  error            ModuleNotFoundError" in render(info)


def test_rendering_is_plain_text():
    text = render(
        {"torch": {"gpus": [{"name": "X", "bf16": True}], "mps": False, "hip_build": None, "cpu_capability": "AVX2"}}
    )
    assert text == (
        "torch\n  gpus             name X, bf16 yes\n  mps              no\n"
        "  hip build        -\n  cpu capability   AVX2"
    )
    assert "none" in render({"torch": {"gpus": []}})
