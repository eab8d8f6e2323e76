"""Loading and saving: devices, precision, pad tokens, LoRA, and folders with the same logits."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from forethought.errors import ConfigError, MissingExtraError, ModelError, RunError
from forethought.models import load, registry
from forethought.models.load import LoRA, choose_device, choose_dtype, load_model, save_pretrained
from forethought.models.tiny import FAMILIES, char_tokenizer, tiny_model

IDS = torch.arange(3, 11)[None]


def quiet(line: str) -> None:
    pass


@pytest.fixture
def tok():
    return char_tokenizer("abcdefgh", chat_template="{{ messages[0]['content'] }}")


@pytest.fixture
def base(tmp_path, tok):
    folder = tmp_path / "base"
    save_pretrained(tiny_model(len(tok), init_std=0.2), tok, folder)
    return folder


@torch.no_grad()
def logits(model):
    return model(IDS.to(next(model.parameters()).device)).logits.float()


# -- folders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_loads_with_transformers_and_gives_the_same_logits(family, tie, tmp_path, tok):
    model = tiny_model(len(tok), family=family, tie=tie, init_std=0.2, **({} if family == "llama" else {"window": 4}))
    save_pretrained(model, tok, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model))
    assert (again.get_input_embeddings().weight is again.get_output_embeddings().weight) == tie
    names = {p.name for p in tmp_path.iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    } <= names
    assert str(tmp_path) not in (tmp_path / "config.json").read_text()
    mine, its = load_model(tmp_path, dtype="float32", device="cpu", say=quiet)
    assert torch.equal(logits(mine), logits(model)) and not mine.training
    assert its.encode("abh") == tok.encode("abh") and its.chat_template == tok.chat_template
    # And once more: what was loaded saves the same again.
    save_pretrained(mine, its, tmp_path / "again")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), logits(model))


@pytest.mark.parametrize("tie", [True, False])
def test_masters_are_saved_in_place_of_rounded_weights(tie, tmp_path, tok):
    model = tiny_model(len(tok), tie=tie, init_std=0.2)
    want = logits(model)
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    rounded = model.to(torch.bfloat16)
    save_pretrained(rounded, tok, tmp_path, state=masters)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), want)
    assert next(rounded.parameters()).dtype == torch.bfloat16  # the live model is as it was
    with pytest.raises(
        ConfigError, match=r"state: 'model.norm.wieght' is not a parameter.*did you mean 'model.norm.weight'"
    ):
        save_pretrained(rounded, tok, tmp_path, state={"model.norm.wieght": torch.zeros(1)})


def test_the_default_dtype_is_that_of_the_device(base):
    model, _ = load_model(base, device="cpu", say=quiet)
    assert {p.dtype for p in model.parameters()} == {choose_dtype("cpu")[0]}
    model, _ = load_model(base, device="cpu", dtype=torch.bfloat16, say=quiet)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_source_and_precision_are_said_once(base, capsys):
    load._said.clear()
    for _ in range(2):
        load_model(base, dtype="fp32", device="cpu")
    assert capsys.readouterr().err.count("from local folder; float32 on cpu: as asked") == 1
    lines = []
    load_model(base, device="cpu", say=lines.append)
    dtype, reason = choose_dtype("cpu")
    assert lines == [f"model {base}: from local folder; {str(dtype)[6:]} on cpu: {reason}"]


def test_qwen2_keeps_the_tokenizer_of_its_folder(tmp_path):
    tok = char_tokenizer("ab 1")
    save_pretrained(tiny_model(len(tok), family="qwen2"), tok, tmp_path)
    _, its = load_model(tmp_path, dtype="fp32", device="cpu", say=quiet)
    assert its.encode("a 1") == tok.encode("a 1") == [3, 5, 6]


# -- pad tokens ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "pad"),
    [((), "<pad>"), (("pad",), "<eos>"), (("pad", "eos"), "<bos>"), (("pad", "eos", "bos"), "<pad>")],
)
def test_a_tokenizer_without_pad_token_gets_one(missing, pad, base):
    config = json.loads((base / "tokenizer_config.json").read_text())
    for name in missing:
        del config[f"{name}_token"]
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    settings = json.loads((base / "config.json").read_text())
    settings["pad_token_id"] = None
    (base / "config.json").write_text(json.dumps(settings))
    model, tok = load_model(base, dtype="fp32", device="cpu", say=quiet)
    assert tok.pad_token == pad
    assert model.config.pad_token_id == tok.pad_token_id


def test_a_tokenizer_that_is_larger_than_the_model_is_refused(tmp_path, tok):
    save_pretrained(tiny_model(len(tok) - 1), tok, tmp_path)
    with pytest.raises(ModelError, match="the tokenizer has 11 tokens, the model 10 embeddings"):
        load_model(tmp_path, device="cpu", say=quiet)


def test_folders_that_cannot_be_loaded(base, tmp_path):
    with pytest.raises(ModelError, match="was not found"):
        load_model("no/such-model", device="cpu", say=quiet)
    (base / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="the tokenizer cannot be loaded"):
        load_model(base, device="cpu", say=quiet)


def test_weights_cut_short_are_refused(base):
    path = base / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot be loaded as a causal language model"):
        load_model(base, device="cpu", say=quiet)


def test_a_place_that_cannot_be_written(tmp_path, tok):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="a file is in the place"):
        save_pretrained(tiny_model(len(tok)), tok, tmp_path / "file")


# -- LoRA ------------------------------------------------------------------------------------------------------------


def with_adapter(base, **kw):
    model, tok = load_model(base, dtype="fp32", device="cpu", lora=LoRA(rank=4, alpha=8, **kw), say=quiet)
    generator = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data = torch.randn(p.shape, generator=generator) * 0.3
    return model, tok


def test_a_fresh_adapter_changes_nothing_and_is_all_that_trains(base):
    plain, _ = load_model(base, dtype="fp32", device="cpu", say=quiet)
    model, _ = load_model(base, dtype="fp32", device="cpu", lora=LoRA(rank=4), say=quiet)
    assert torch.equal(logits(model), logits(plain))
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 7 * 2 and all("lora_" in n for n in trained)  # 2 layers x 7 linear layers x (A, B)
    shapes = {tuple(p.shape) for n, p in model.named_parameters() if "q_proj.lora_A" in n}
    assert shapes == {(4, 64)}


def test_adapters_are_saved_alone_and_come_back(base, tmp_path):
    model, tok = with_adapter(base)
    want = logits(model)
    save_pretrained(model, tok, tmp_path / "adapter")
    assert not (tmp_path / "adapter/model.safetensors").exists()
    again, _ = load_model(tmp_path / "adapter", dtype="fp32", device="cpu", say=quiet)
    assert torch.equal(logits(again), want)
    assert any(p.requires_grad for p in again.parameters())
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")), want)
    with pytest.raises(ModelError, match="holds an adapter already"):
        load_model(tmp_path / "adapter", device="cpu", lora=LoRA(), say=quiet)


def test_a_merged_adapter_is_a_plain_model(base, tmp_path):
    model, tok = with_adapter(base)
    want = logits(model)
    save_pretrained(model, tok, tmp_path / "merged", merge=True)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert type(again).__name__ == "LlamaForCausalLM"
    assert torch.allclose(logits(again), want, atol=1e-5)
    assert torch.equal(logits(model), want) and hasattr(model, "peft_config")  # the live model is as it was
    AutoTokenizer.from_pretrained(tmp_path / "merged")


def test_masters_of_an_adapter(base, tmp_path):
    model, tok = with_adapter(base)
    want = logits(model)
    masters = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    rounded = model.to(torch.bfloat16)
    save_pretrained(rounded, tok, tmp_path / "adapter", state=masters)
    again, _ = load_model(tmp_path / "adapter", dtype="fp32", device="cpu", say=quiet)
    assert torch.equal(logits(again), want)
    save_pretrained(rounded, tok, tmp_path / "merged", state=masters, merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == torch.float32
    assert (logits(merged) - want).abs().max() < 0.2  # the frozen base was rounded to bfloat16
    assert {p.dtype for p in rounded.parameters()} == {torch.bfloat16}


def test_adapter_targets_by_name(base):
    model, _ = with_adapter(base, targets=("q_proj", "v_proj"))
    names = {n.split(".")[-4] for n, p in model.named_parameters() if p.requires_grad}
    assert names == {"q_proj", "v_proj"}
    with pytest.raises(ModelError, match=r"lora: targets=\('nope',\) do not fit this model"):
        with_adapter(base, targets=("nope",))


def test_an_adapter_whose_base_is_gone(base, tmp_path):
    model, tok = with_adapter(base)
    save_pretrained(model, tok, tmp_path / "adapter")
    base.rename(tmp_path / "moved")
    with pytest.raises(ModelError, match="the adapter's base model is missing: .*no such folder"):
        load_model(tmp_path / "adapter", device="cpu", say=quiet)
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="does not name its base model"):
        load_model(tmp_path / "adapter", device="cpu", say=quiet)


def test_merge_without_an_adapter(tmp_path, tok):
    with pytest.raises(ConfigError, match="merge=True: the model has no adapter"):
        save_pretrained(tiny_model(len(tok)), tok, tmp_path, merge=True)


def test_bad_adapter_settings():
    with pytest.raises(ConfigError, match=r"rank=0: give at least 1; alpha=-1: .*; targets='': .*; dropout=1: "):
        LoRA(rank=0, alpha=-1, targets="", dropout=1)


def test_peft_that_is_not_installed(base, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setattr(registry, "resolve", lambda *a, **k: pytest.fail("looked for the model first"))
    with pytest.raises(MissingExtraError, match=r"pip install 'forethought\[peft\]'"):
        load_model(base, lora=LoRA(), say=quiet)


# -- devices and precision -------------------------------------------------------------------------------------------


def test_devices_that_are_there(monkeypatch):
    assert choose_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert choose_device() == choose_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device() == torch.device("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert choose_device() == torch.device("cuda", 3)


@pytest.mark.parametrize("name", ["gpu", "cud", "xpu:0", "cpu:x", "meta"])
def test_names_that_are_no_devices(name):
    with pytest.raises(ConfigError, match=f"device='{name}': give one of auto, cpu, cuda, mps"):
        choose_device(name)


def test_absent_devices_say_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ModelError, match="device mps: needs a Mac"):
        choose_device("mps")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(ModelError, match="device cuda: this torch was built without CUDA; install a CUDA build"):
        choose_device("cuda")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match="no CUDA device is visible; check nvidia-smi"):
        choose_device("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ModelError, match=r"device cuda:2: only 1 CUDA device\(s\) here"):
        choose_device("cuda:2")


@pytest.mark.parametrize(
    ("has", "dtype", "word"),
    [
        ({"amx_bf16": True, "avx512_bf16": True}, torch.bfloat16, "AMX and AVX512-BF16"),
        ({"avx512_bf16": True}, torch.bfloat16, "the CPU has AVX512-BF16"),
        ({"amx_bf16": False, "avx512_f": True}, torch.float32, "neither AVX512-BF16 nor AMX"),
        ({}, torch.float32, "neither"),
    ],
)
def test_precision_of_cpus(has, dtype, word, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    got, reason = choose_dtype("cpu")
    assert got == dtype and word in reason


def test_precision_of_cpus_with_an_older_torch(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert choose_dtype("cpu") == (torch.bfloat16, "the CPU has AMX")


def test_precision_of_gpus(monkeypatch):
    for supported, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation=True, s=supported: s or including_emulation
        )
        assert choose_dtype("cuda:0")[0] == dtype
    assert choose_dtype("mps")[0] == torch.float32


@pytest.mark.parametrize("dtype", ["bf15", "int8", torch.int64])
def test_bad_dtypes(dtype, base):
    with pytest.raises(ConfigError, match="dtype=.*: give one of float32"):
        load_model(base, dtype=dtype, device="cpu", say=quiet)
