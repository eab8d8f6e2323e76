"""Tiny decoders and tokenizers made on the spot: for miniatures that learn from scratch, and for tests.

The models are those of transformers, made from a config with random weights, and the tokenizers are ordinary
`PreTrainedTokenizerFast` objects, so both are saved and loaded like any pretrained model. (AutoTokenizer replaces the
tokenizer of a qwen2 folder by Qwen2's own, whatever is saved there; `load.load_model` does not.) All tokenizers here
begin with the same three special tokens: <pad> 0, <bos> 1, <eos> 2; `tiny_model` writes these ids into its config.

Shapes: V vocabulary, D width, H heads, K key-value heads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers import models as token_models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from forethought.errors import ConfigError, nearest

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2


def _finish(
    tokenizer: Tokenizer, specials: Sequence[str], add_bos: bool, chat_template: str | None, context: int | None
) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        **({"model_max_length": context} if context else {}),
    )
    fast.chat_template = chat_template
    return fast


def _vocabulary(specials: Sequence[str], pieces: Iterable[str], what: str) -> tuple[list[str], dict[str, int]]:
    special = [PAD, BOS, EOS, *specials]
    every = special + list(pieces)
    if len(set(every)) != len(every):
        twice = next(p for p in every if every.count(p) > 1)
        raise ConfigError(f"{what}: {twice!r} is given twice; each token needs one id")
    if any(not p for p in every):
        raise ConfigError(f"{what}: an empty token; remove it")
    return special, {p: i for i, p in enumerate(every)}


def char_tokenizer(
    chars: Iterable[str],
    *,
    specials: Sequence[str] = (),
    add_bos: bool = False,
    chat_template: str | None = None,
    context: int | None = None,
) -> PreTrainedTokenizerFast:
    """One token per character.

    Args:
        chars: the alphabet, in the order of its ids (after the special tokens).
        specials: further special tokens (role headers, ...); ids 3, 4, ...
        add_bos: put <bos> in front of every encoded text.
        chat_template: Jinja template of a chat model.
        context: longest sequence, in tokens.

    Text with a character outside the alphabet cannot be encoded (an exception, not a silent loss).

    Raises:
        ConfigError: a character is longer than one, empty, or given twice.
    """
    chars = list(chars)
    if any(len(c) != 1 for c in chars):
        raise ConfigError(f"chars: {next(c for c in chars if len(c) != 1)!r} is not one character; see word_tokenizer")
    special, vocab = _vocabulary(specials, chars, "chars")
    tokenizer = Tokenizer(token_models.WordLevel(vocab, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return _finish(tokenizer, special, add_bos, chat_template, context)


def word_tokenizer(
    words: Iterable[str],
    *,
    specials: Sequence[str] = (),
    add_bos: bool = False,
    chat_template: str | None = None,
    context: int | None = None,
) -> PreTrainedTokenizerFast:
    """One token per word; words are separated by white space and decoded with single spaces. Arguments as above.

    Raises:
        ConfigError: a word is empty, holds white space, or is given twice.
    """
    words = list(words)
    if any(w.split() != [w] for w in words):
        raise ConfigError(f"words: {next(w for w in words if w.split() != [w])!r} is not one word without white space")
    special, vocab = _vocabulary(specials, words, "words")
    tokenizer = Tokenizer(token_models.WordLevel(vocab, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _finish(tokenizer, special, add_bos, chat_template, context)


def piece_tokenizer(pieces: Iterable[str], *, context: int | None = None) -> PreTrainedTokenizerFast:
    """One token per piece of a closed world: a whole number is one token, and so is every set phrase (the longest first).

    Text that is not made of the pieces cannot be encoded (an exception, not a silent loss).

    Raises:
        ConfigError: a piece is empty or given twice.
    """
    special, vocab = _vocabulary((), pieces, "pieces")
    phrases = sorted((p for p in vocab if not p.isdigit() and p not in special), key=len, reverse=True)
    tokenizer = Tokenizer(token_models.WordLevel(vocab, unk_token="<unknown>"))
    pattern = "|".join([r"\d+", *map(re.escape, phrases)])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return _finish(tokenizer, special, False, None, context)


def byte_tokenizer(
    *,
    specials: Sequence[str] = (),
    add_bos: bool = False,
    chat_template: str | None = None,
    context: int | None = None,
) -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte: encodes any text and needs no training. Arguments as above."""
    special, vocab = _vocabulary(specials, sorted(pre_tokenizers.ByteLevel.alphabet()), "bytes")
    tokenizer = Tokenizer(token_models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _finish(tokenizer, special, add_bos, chat_template, context)


# What each family needs beyond the common sizes: (config class, fields from layers, context, window).
_Extra = Callable[[int, int, int, int | None], dict[str, Any]]


def _full(layers: int, context: int, head: int, window: int | None) -> dict[str, Any]:
    return {"head_dim": head}


def _qwen(layers: int, context: int, head: int, window: int | None) -> dict[str, Any]:
    # Layers from max_window_layers on slide.
    return {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": layers // 2}


def _alternating(layers: int, window: int | None) -> list[str]:
    return ["sliding_attention" if window is not None and i % 2 == 0 else "full_attention" for i in range(layers)]


def _gemma(layers: int, context: int, head: int, window: int | None) -> dict[str, Any]:
    return {
        "head_dim": head,
        "query_pre_attn_scalar": head,
        "sliding_window": window or context,
        "layer_types": _alternating(layers, window),
    }


_FAMILIES: dict[str, tuple[str, _Extra]] = {
    "llama": ("LlamaConfig", _full),
    "qwen2": ("Qwen2Config", _qwen),
    "qwen3": ("Qwen3Config", lambda la, c, h, w: _qwen(la, c, h, w) | {"head_dim": h}),
    # Soft caps below the published 30 and 50, so that they bite at this size.
    "gemma2": (
        "Gemma2Config",
        lambda la, c, h, w: _gemma(la, c, h, w) | {"final_logit_softcapping": 10.0, "attn_logit_softcapping": 5.0},
    ),
    "gemma3": ("Gemma3TextConfig", _gemma),
    "phi3": ("Phi3Config", lambda la, c, h, w: {"sliding_window": w}),
    "mistral": ("MistralConfig", lambda la, c, h, w: {"head_dim": h, "sliding_window": w}),
}
FAMILIES: tuple[str, ...] = tuple(_FAMILIES)
"""Families of decoders that `tiny_model` makes: grouped queries in all; q/k norm in qwen3 and gemma3, soft caps in
gemma2, and sliding windows where `window` is given (llama has none)."""


def tiny_model(
    vocab_size: int,
    *,
    width: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int | None = None,
    context: int = 256,
    family: str = "llama",
    tie: bool = True,
    seed: int = 0,
    window: int | None = None,
    init_std: float = 0.02,
) -> Any:
    """A random causal LM in evaluation mode, float32, the same for the same arguments.

    Args:
        vocab_size: V; `len(tokenizer)`.
        width: D; the feed-forward layer has 4 D (2 D gated pairs would be the same size).
        kv_heads: K, by default H // 2 (at least 1).
        context: longest sequence.
        family: one of `FAMILIES`.
        tie: one matrix for the embedding and the head.
        seed: of the weights; the global generator is left as it was.
        window: tokens that a sliding layer sees (all layers of phi3 and mistral, half of those of qwen and gemma).
        init_std: standard deviation of the weights; about 0.2 makes an untrained model far from uniform, for tests.

    Raises:
        ConfigError: an unknown family, or sizes that do not fit (all problems at once).
    """
    if family not in _FAMILIES:
        raise ConfigError(f"family={family!r}: known are {', '.join(FAMILIES)}{nearest(family, FAMILIES)}")
    kv_heads = max(1, heads // 2) if kv_heads is None else kv_heads
    bad = [
        f"{name}={value}: give at least {least}"
        for name, value, least in (
            ("vocab_size", vocab_size, EOS_ID + 1),
            ("width", width, 1),
            ("layers", layers, 1),
            ("heads", heads, 1),
            ("kv_heads", kv_heads, 1),
            ("context", context, 1),
        )
        if value < least
    ]
    if not bad and (width % heads or width // heads % 2):
        bad.append(f"width={width}, heads={heads}: width must be a multiple of 2 x heads (rotary pairs)")
    if not bad and heads % kv_heads:
        bad.append(f"heads={heads}, kv_heads={kv_heads}: heads must be a multiple of kv_heads")
    if window is not None and (window < 1 or family == "llama"):
        bad.append(f"window={window}: " + ("llama has no sliding window" if family == "llama" else "give at least 1"))
    if bad:
        raise ConfigError("tiny_model: " + "; ".join(bad))
    name, extra = _FAMILIES[family]
    config = getattr(transformers, name)(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        tie_word_embeddings=tie,
        initializer_range=init_std,
        **extra(layers, context, width // heads, window),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
