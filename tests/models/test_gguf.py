"""GGUF files: rotary rows, weights, tokenizer, and what is refused."""

import json

import gguf
import ggufs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from forethought.errors import ModelError
from forethought.models import registry
from forethought.models.gguf import GGUFFile, convert_gguf, to_halves, to_interleaved

IDS = torch.tensor([[1, 17, 40, 9, 255, 100, 3, 2, 63, 140, 7, 7]])


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def convert(path, tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    convert_gguf(path, folder)
    return folder


# -- H35: rotary rows ------------------------------------------------------------------------------------------------


def test_h35_order_of_one_head_and_back():
    rows = np.arange(8)
    assert to_interleaved(rows, 1).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert to_halves(rows, 1).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


@given(heads=st.integers(1, 5), half=st.integers(1, 6), width=st.integers(0, 3))
def test_each_order_undoes_the_other_head_by_head(heads, half, width):
    rows = np.arange(heads * half * 2 * max(width, 1)).reshape((heads * half * 2, width) if width else (-1,))
    there = to_interleaved(rows, heads)
    assert np.array_equal(to_halves(there, heads), rows)
    size = half * 2
    for h in range(heads):  # heads do not mix
        own = slice(h * size, (h + 1) * size)
        assert np.array_equal(there[own], to_interleaved(rows[own], 1))


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_h35_full_precision_file_against_its_twin(family, tie, tmp_path):
    model = ggufs.twin(family, tie=tie)
    folder = convert(ggufs.write(tmp_path / "m.gguf", model), tmp_path)
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert (logits(again) - logits(model)).abs().max() < 1e-4
    assert logits(model).std() > 0.5
    want, got = model.state_dict(), again.state_dict()
    assert want.keys() == got.keys() and all(torch.equal(want[k], got[k]) for k in want)
    assert (again.get_input_embeddings().weight is again.get_output_embeddings().weight) == tie


@pytest.mark.parametrize(("family", "permute"), [("llama", False), ("qwen2", True)])
def test_the_wrong_order_would_show(family, permute, tmp_path):
    model = ggufs.twin(family)
    folder = convert(ggufs.write(tmp_path / "m.gguf", model, permute=permute), tmp_path)
    assert (logits(AutoModelForCausalLM.from_pretrained(folder)) - logits(model)).abs().max() > 0.01


def test_biases_are_reordered_with_their_rows(tmp_path):
    from transformers import LlamaConfig

    sizes = ggufs.twin().config.to_dict()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**sizes, "attention_bias": True, "mlp_bias": True}))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3)
    folder = convert(ggufs.write(tmp_path / "m.gguf", model), tmp_path)
    assert (logits(AutoModelForCausalLM.from_pretrained(folder)) - logits(model)).abs().max() < 1e-4


# -- weights and config ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1", "Q4_0", "Q5_1"])
def test_quantised_weights_are_exactly_those_of_the_file(kind, tmp_path):
    path = ggufs.write(tmp_path / "m.gguf", kind=kind)
    model = AutoModelForCausalLM.from_pretrained(convert(path, tmp_path))
    stored = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    state = {k: v.numpy() for k, v in model.state_dict().items()}
    assert model.dtype == torch.float32
    assert np.array_equal(state["model.embed_tokens.weight"], stored["token_embd.weight"])
    assert np.array_equal(state["model.layers.1.mlp.down_proj.weight"], stored["blk.1.ffn_down.weight"])
    q = stored["blk.0.attn_q.weight"]
    assert np.array_equal(
        state["model.layers.0.self_attn.q_proj.weight"][:16], q[:16][[*range(0, 16, 2), *range(1, 16, 2)]]
    )
    true = ggufs.twin().state_dict()["model.layers.0.mlp.up_proj.weight"].numpy()
    error = np.abs(state["model.layers.0.mlp.up_proj.weight"] - true).max()
    assert 0 < error < 0.2


def test_config_and_files(tmp_path):
    folder = convert(ggufs.write(tmp_path / "m.gguf", kind="Q4_1"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "float32"
    assert config["rms_norm_eps"] == 1e-06 and config["rope_parameters"] == {
        "rope_theta": 10000.0,
        "rope_type": "default",
    }
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
    assert (config["head_dim"], config["max_position_embeddings"]) == (16, 256)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (2, 2)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "again")  # transformers refuses this for its own GGUF models
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), logits(model))


# -- tokenizer -------------------------------------------------------------------------------------------------------


def pieces(tmp_path, text, **kw):
    tok = AutoTokenizer.from_pretrained(convert(ggufs.write(tmp_path / "m.gguf", **kw), tmp_path))
    assert tok.decode(tok.encode(text, add_special_tokens=False)) == text
    return tok.tokenize(text)


@pytest.mark.parametrize("pre", ["smollm", "starcoder"])
def test_digits_and_the_space_before_them_stand_alone(pre, tmp_path):
    assert pieces(tmp_path, "12 7  7", pre=pre) == ["1", "2", "Ġ", "7", "ĠĠ", "7"]


@pytest.mark.parametrize(
    ("pre", "want"),
    [
        ("gpt-2", ["12", "Ġ7", "Ġ", "Ġ7", "Ċ", "Ċ", "a"]),
        ("qwen2", ["1", "2", "Ġ", "7", "Ġ", "Ġ", "7", "ĊĊ", "a"]),
        ("llama-bpe", ["12", "Ġ", "7", "Ġ", "Ġ", "7", "ĊĊ", "a"]),
    ],
)
def test_other_splitting_rules(pre, want, tmp_path):
    assert pieces(tmp_path, "12 7  7\n\na", pre=pre) == want


def test_special_tokens_template_and_length(tmp_path):
    tok = AutoTokenizer.from_pretrained(convert(ggufs.write(tmp_path / "m.gguf"), tmp_path))
    assert (tok.bos_token, tok.eos_token, tok.pad_token, tok.unk_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
        "<|endoftext|>",
    )
    assert tok.encode("<|im_start|>a<|im_end|>") == [1, ggufs.TOKENS.index("a"), 2]
    assert tok.decode([1, ggufs.TOKENS.index("a"), 2, 0], skip_special_tokens=True) == "a"
    assert tok.chat_template == ggufs.TEMPLATE and tok.model_max_length == 256
    text = "Größe 😀\t\r\n don't 2½ — <|im_end|>"
    assert tok.decode(tok.encode(text)) == text
    assert len(tok) == len(ggufs.TOKENS)


def test_beginning_token_as_the_file_says(tmp_path):
    tok = AutoTokenizer.from_pretrained(convert(ggufs.write(tmp_path / "m.gguf", add_bos=True), tmp_path))
    assert tok.encode("a") == [1, ggufs.TOKENS.index("a")]


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kw", "message"),
    [
        ({"arch": "gemma2"}, "GGUF architecture 'gemma2' is not converted here .only llama, qwen2, qwen3"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre='tekken'. is not rebuilt here"),
        ({"pre": None}, "tokenizer.ggml.pre=None"),
        ({"tokenizer": "llama"}, "tokenizer.ggml.model='llama'"),
        ({"extra": {"llama.rope.scaling.type": "yarn"}}, "scaled rotary positions"),
        ({"more": ["rope_freqs.weight"]}, "scaled rotary positions"),
        ({"extra": {"llama.rope.dimension_count": 8}}, "rotary positions on a part of each head"),
        ({"extra": {"llama.attention.sliding_window": 128, "llama.expert_count": 8}}, "a sliding window, experts"),
        ({"more": ["blk.0.ffn_gate_inp.weight"]}, "the tensor 'blk.0.ffn_gate_inp.weight' is not known here"),
        ({"more": ["blk.0.attn_q.scale"]}, "the tensor 'blk.0.attn_q.scale' is not known here"),
        ({"drop": ["blk.1.ffn_up.weight"]}, r"weight model.layers.1.mlp.up_proj.weight: shape missing in the file"),
        ({"drop": ["token_embd.weight"]}, "'token_embd.weight' is missing"),
    ],
)
def test_files_that_this_module_does_not_know(kw, message, tmp_path):
    path = ggufs.write(tmp_path / "m.gguf", **kw)
    with pytest.raises(ModelError, match=message):
        convert(path, tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.6, 0.95])
def test_files_cut_short(share, tmp_path):
    path = ggufs.write(tmp_path / "m.gguf")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelError, match="m.gguf: "):
        convert(path, tmp_path)


def test_no_such_file_and_no_gguf(tmp_path):
    with pytest.raises(ModelError, match="no such GGUF file"):
        GGUFFile(tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("hello, this is text and no model at all" * 9)
    with pytest.raises(ModelError, match="not a whole GGUF file"):
        GGUFFile(tmp_path / "text.gguf")


# -- the real model --------------------------------------------------------------------------------------------------


def test_smollm2_from_its_wheel():
    found = registry.cached("smollm2-135m-instruct")
    if found is None:
        pytest.skip("SmolLM2 was not fetched yet (`forethought demo` does it)")
    tok = AutoTokenizer.from_pretrained(found.path)
    assert tok.tokenize("7 + 512? x=  12") == ["7", "Ġ+", "Ġ", "5", "1", "2", "?", "Ġx", "=", "ĠĠ", "1", "2"]
    prompt = tok.apply_chat_template([{"role": "user", "content": "What is 7 + 5?"}], add_generation_prompt=True)[
        "input_ids"
    ]
    assert tok.decode(prompt) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 7 + 5?<|im_end|>\n<|im_start|>assistant\n"
    )
    model = AutoModelForCausalLM.from_pretrained(found.path)
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([prompt])).logits).all()
        out = model.generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False)[0, len(prompt) :]
    assert tok.decode(out) == "To add 7 and 5, you simply add them together: 7 + 5 = 12.<|im_end|>"
