"""Tiny models and tokenizers: what they encode, that they follow their arguments, and that they are saved whole."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from forethought.errors import ConfigError
from forethought.models.tiny import (
    BOS_ID,
    EOS_ID,
    FAMILIES,
    PAD_ID,
    byte_tokenizer,
    char_tokenizer,
    tiny_model,
    word_tokenizer,
)


def test_char_tokenizer_keeps_every_character():
    tok = char_tokenizer("ab c\n", specials=["<user>"])
    assert tok.encode("<user>b a\n<eos>") == [3, 5, 6, 4, 8, 2]
    assert tok.decode([5, 6, 6, 4, 8]) == "b  a\n"
    assert (tok.pad_token_id, tok.bos_token_id, tok.eos_token_id) == (PAD_ID, BOS_ID, EOS_ID) == (0, 1, 2)
    assert len(tok) == 9
    assert tok.decode([3, 4, 2], skip_special_tokens=True) == "a"


def test_a_character_outside_the_alphabet_is_refused():
    with pytest.raises(Exception, match="vocabulary"):
        char_tokenizer("ab").encode("axb")


def test_word_tokenizer():
    tok = word_tokenizer(["go", "left", "right"])
    assert tok.encode("go  left\nright <eos>") == [3, 4, 5, 2]
    assert tok.decode([3, 5]) == "go right"
    with pytest.raises(Exception, match="vocabulary"):
        tok.encode("go up")


def test_byte_tokenizer_encodes_any_text():
    tok = byte_tokenizer()
    text = "héllo 😀\t\x00 don't\r\n"
    assert tok.decode(tok.encode(text)) == text
    assert len(tok.encode(text)) == len(text.encode())
    assert len(tok) == 259


@pytest.mark.parametrize(
    "make", [lambda **k: char_tokenizer("xy", **k), lambda **k: word_tokenizer(["x", "y"], **k), byte_tokenizer]
)
def test_beginning_token_only_when_asked(make):
    assert make().encode("x")[:1] != [BOS_ID]
    assert make(add_bos=True).encode("x")[:1] == [BOS_ID]
    assert make(add_bos=True).encode("x", add_special_tokens=False)[:1] != [BOS_ID]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: char_tokenizer(["ab"]), "chars: 'ab' is not one character"),
        (lambda: char_tokenizer("aba"), "chars: 'a' is given twice"),
        (lambda: char_tokenizer("ab", specials=["<eos>"]), "chars: '<eos>' is given twice"),
        (lambda: word_tokenizer(["go left"]), "words: 'go left' is not one word"),
        (lambda: word_tokenizer([""]), "words: '' is not one word"),
        (lambda: byte_tokenizer(specials=[""]), "bytes: an empty token"),
    ],
)
def test_bad_alphabets(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_tokenizers_are_saved_with_their_template(tmp_path):
    tok = char_tokenizer("ab", specials=["<u>"], add_bos=True, chat_template="{{ bos_token }}<u>", context=64)
    tok.save_pretrained(tmp_path)
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert again.encode("ab<u>") == [1, 4, 5, 3]
    assert again.chat_template == "{{ bos_token }}<u>"
    assert again.model_max_length == 64


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, tie, tmp_path):
    model = tiny_model(
        31, family=family, tie=tie, width=32, layers=2, heads=4, kv_heads=2, context=48, init_std=0.2, seed=3
    )
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (32, 2, 4)
    assert (config.num_key_value_heads, config.max_position_embeddings, config.vocab_size) == (2, 48, 31)
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tie
    assert all(p.dtype == torch.float32 for p in model.parameters()) and not model.training
    ids = torch.arange(3, 23)[None]
    want = model(ids).logits
    assert torch.isfinite(want).all() and want.std() > 0.3
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, want)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "llama"])
def test_a_window_shorter_than_the_sequence_changes_what_is_seen(family):
    ids = torch.arange(3, 23)[None]
    other = ids.clone()
    other[0, 0] = 29
    # One layer: a sliding layer at the first place for gemma, phi3 and mistral; qwen slides from layers // 2 = 0 on.
    model = tiny_model(31, family=family, window=6, layers=1, init_std=0.2)
    changed = (model(ids).logits - model(other).logits).abs().amax(-1)[0]
    assert changed[5] > 1e-4  # position 5 still sees position 0 in a window of 6
    assert changed[6:].max() == 0
    full = tiny_model(31, family=family, layers=1, init_std=0.2)
    assert (full(ids).logits - full(other).logits).abs().amax(-1)[0, 6:].min() > 1e-5


def test_marks_of_the_families():
    assert tiny_model(31, family="gemma2").config.final_logit_softcapping == 10.0
    assert tiny_model(31, family="gemma2", init_std=2.0)(torch.arange(3, 9)[None]).logits.abs().max() <= 10.0
    for family in FAMILIES:
        names = {n for n, _ in tiny_model(31, family=family).named_parameters()}
        assert any("q_norm" in n for n in names) == (family in ("qwen3", "gemma3"))


def test_seed_decides_the_weights_and_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    a, b, c = (tiny_model(31, seed=s).state_dict() for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("kw", "message"),
    [
        ({"family": "lama"}, "family='lama'.*did you mean 'llama'"),
        ({"width": 30, "heads": 4}, "width=30, heads=4"),
        ({"heads": 4, "kv_heads": 3}, "heads=4, kv_heads=3"),
        ({"layers": 0, "context": 0}, "layers=0: give at least 1; context=0: give at least 1"),
        ({"window": 4}, "window=4: llama has no sliding window"),
    ],
)
def test_bad_sizes(kw, message):
    with pytest.raises(ConfigError, match=message):
        tiny_model(31, **kw)


def test_auto_classes_load_a_saved_pair(tmp_path):
    tok = char_tokenizer("abc ")
    tok.save_pretrained(tmp_path)
    tiny_model(len(tok)).save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).encode("a b") == tok.encode("a b") == [3, 6, 4]
