"""GGUF files (llama.cpp's format) -> a standard Hugging Face folder, once.

Weights are dequantised to float32 (a Q4_1 weight is scale * q + minimum with half-precision scale and minimum: not a
bfloat16 number), so the folder is as large as the float32 model. What the format stores differently is put back: rotary
query and key rows (see `to_halves`), tied heads, tokenizer and chat template.

Departures from transformers' own GGUF loader: the tokenizer is built from the file's vocabulary and merges with the
pre-tokenizer that `tokenizer.ggml.pre` names (that loader takes GPT-2's for every Llama file, which splits digits and
spaces otherwise than SmolLM2 was trained), the config carries no quantisation entry (transformers refuses to save a
model that has one), and whatever this module does not know is refused rather than guessed.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; tensor names and the reordering of rotary rows as in
llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from forethought.errors import ModelError

# architecture -> (config class, whether the writer reorders query and key rows)
ARCHITECTURES: dict[str, tuple[Any, bool]] = {
    "llama": (LlamaConfig, True),
    "qwen2": (Qwen2Config, False),
    "qwen3": (Qwen3Config, False),
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGIT_SPLITTERS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_PRE_TOKENIZERS = ("gpt-2", *_DIGIT_SPLITTERS, "qwen2", "llama-bpe")


def to_interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rotary rows [heads * size, ...] from half layout (transformers: pair i is rows i and i + size/2 of its head) to
    interleaved layout (GGUF: rows 2i and 2i + 1)."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def to_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Inverse of `to_interleaved`."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


class GGUFFile:
    """An open GGUF file: metadata by key, tensors by name.

    Raises:
        ModelError: no such file, not GGUF, cut short, or of an architecture that is not converted here.
    """

    def __init__(self, path: str | Path):
        import gguf

        self.path = Path(path)
        if not self.path.is_file():
            raise ModelError(f"{self.path}: no such GGUF file")
        try:
            self._reader = gguf.GGUFReader(self.path)  # pyright: ignore[reportAttributeAccessIssue]
            self.meta = {name: field.contents() for name, field in self._reader.fields.items()}
        except (ValueError, IndexError, KeyError, OSError, TypeError) as err:
            raise ModelError(f"{self.path}: not a whole GGUF file ({err}); fetch it again") from err
        self.tensors = {t.name: t for t in self._reader.tensors}
        self.architecture = self.meta.get("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise ModelError(
                f"{self.path}: GGUF architecture {self.architecture!r} is not converted here (only "
                f"{', '.join(ARCHITECTURES)}); use the model's original Hugging Face folder"
            )

    def require(self, key: str) -> Any:
        if key not in self.meta:
            raise ModelError(f"{self.path}: the metadata key {key!r} is missing; use the model's original folder")
        return self.meta[key]

    def array(self, name: str) -> np.ndarray:
        """A tensor, dequantised, float32, in transformers' shape."""
        import gguf

        tensor = self.tensors[name]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)  # pyright: ignore[reportAttributeAccessIssue]
        except NotImplementedError:
            raise ModelError(
                f"{self.path}: tensor {name!r} is stored as {tensor.tensor_type.name}, which cannot be dequantised"
            ) from None
        return np.array(values, np.float32)  # a copy: unquantised tensors are views of the mapped file


def _short(value: float) -> float:
    """A float32 from the file as the decimal number that it stands for (1e-05, not 9.999999747378752e-06)."""
    return float(str(np.float32(value)))


def read_config(file: GGUFFile) -> Any:
    """The transformers config of a GGUF file, without any quantisation entry.

    Raises:
        ModelError: a metadata key is missing, or the file needs something that is not converted here.
    """
    arch = str(file.architecture)
    kind, _ = ARCHITECTURES[arch]
    get = file.meta.get
    width, heads = file.require(f"{arch}.embedding_length"), file.require(f"{arch}.attention.head_count")
    head_dim = get(f"{arch}.attention.key_length") or width // heads
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path}: the tensor 'token_embd.weight' is missing; fetch the file again")
    refused = {
        "scaled rotary positions": get(f"{arch}.rope.scaling.type", "none") not in (None, "none")
        or "rope_freqs.weight" in file.tensors,
        "rotary positions on a part of each head": get(f"{arch}.rope.dimension_count", head_dim) != head_dim,
        "a sliding window": bool(get(f"{arch}.attention.sliding_window")),
        "experts": bool(get(f"{arch}.expert_count")),
    }
    if any(refused.values()):
        what = ", ".join(name for name, found in refused.items() if found)
        raise ModelError(f"{file.path}: the model has {what}, not converted here; use its original Hugging Face folder")
    extra: dict[str, Any] = {}
    if arch == "llama":
        extra = {"attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": "blk.0.ffn_up.bias" in file.tensors}
    if arch != "qwen2":
        extra["head_dim"] = head_dim
    return kind(
        vocab_size=int(file.tensors["token_embd.weight"].shape[-1]),  # GGUF names the fastest dimension first
        hidden_size=width,
        intermediate_size=file.require(f"{arch}.feed_forward_length"),
        num_hidden_layers=file.require(f"{arch}.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=get(f"{arch}.attention.head_count_kv", heads),
        max_position_embeddings=file.require(f"{arch}.context_length"),
        rms_norm_eps=_short(file.require(f"{arch}.attention.layer_norm_rms_epsilon")),
        rope_parameters={"rope_type": "default", "rope_theta": _short(get(f"{arch}.rope.freq_base", 10000.0))},
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=get("tokenizer.ggml.bos_token_id"),
        eos_token_id=get("tokenizer.ggml.eos_token_id"),
        pad_token_id=get("tokenizer.ggml.padding_token_id"),
        architectures=[kind.__name__.replace("Config", "ForCausalLM")],
        dtype="float32",
        **extra,
    )


def read_weights(file: GGUFFile, config: Any) -> dict[str, torch.Tensor]:
    """float32 state dict under transformers' names; a tied head is left out, as transformers saves it.

    Raises:
        ModelError: a tensor is missing, unknown or of another shape than the config says.
    """
    _, reordered = ARCHITECTURES[str(file.architecture)]
    state: dict[str, torch.Tensor] = {}
    for name in file.tensors:
        stem, _, suffix = name.rpartition(".")
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        known = (_BLOCK.get(block[2]) if block else _TOP.get(stem)) if suffix in ("weight", "bias") else None
        if known is None:
            raise ModelError(f"{file.path}: the tensor {name!r} is not known here; use the model's original folder")
        values = file.array(name)
        if reordered and block and block[2] in ("attn_q", "attn_k"):
            values = to_halves(
                values, config.num_attention_heads if block[2] == "attn_q" else config.num_key_value_heads
            )
        state[f"model.layers.{block[1]}.{known}.{suffix}" if block else f"{known}.{suffix}"] = torch.from_numpy(values)
    with torch.device("meta"):
        want = {name: tuple(t.shape) for name, t in AutoModelForCausalLM.from_config(config).state_dict().items()}
    if config.tie_word_embeddings:
        want.pop("lm_head.weight", None)
    have = {name: tuple(t.shape) for name, t in state.items()}
    if have != want:
        name = next(n for n in {**want, **have} if have.get(n) != want.get(n))
        raise ModelError(
            f"{file.path}: weight {name}: shape {have.get(name, 'missing')} in the file, "
            f"{want.get(name, 'no such weight')} by its metadata"
        )
    return state


def _splitter(pre: str) -> tuple[Any, Any]:
    """(normaliser, pre-tokenizer) of a `tokenizer.ggml.pre` name."""
    if pre in ("qwen2", "llama-bpe"):
        words = pre_tokenizers.Split(Regex(_WORDS % (r"\p{N}" if pre == "qwen2" else r"\p{N}{1,3}")), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return normalizers.NFC() if pre == "qwen2" else None, pre_tokenizers.Sequence([words, level])
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _DIGIT_SPLITTERS:
        return None, pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    return None, level


def read_tokenizer(file: GGUFFile) -> PreTrainedTokenizerFast:
    """The tokenizer that the file describes, with chat template, special tokens and context length.

    Raises:
        ModelError: not a byte-level BPE tokenizer, or one whose pre-tokenizer is not known here.
    """
    model, pre = file.require("tokenizer.ggml.model"), file.meta.get("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise ModelError(
            f"{file.path}: the tokenizer (tokenizer.ggml.model={model!r}, tokenizer.ggml.pre={pre!r}) is not rebuilt "
            f"here (only gpt2 with pre in {', '.join(_PRE_TOKENIZERS)}); use the model's original Hugging Face folder"
        )
    tokens: list[str] = file.require("tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in file.require("tokenizer.ggml.merges")]
    try:
        tokenizer = Tokenizer(BPE({t: i for i, t in enumerate(tokens)}, merges, ignore_merges=pre == "llama-bpe"))
    except Exception as err:  # the library raises nothing more precise
        raise ModelError(f"{file.path}: vocabulary and merges do not fit together ({err})") from err
    normaliser, splitter = _splitter(pre)
    if normaliser is not None:
        tokenizer.normalizer = normaliser
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, file.meta.get("tokenizer.ggml.token_type", []), strict=False):
        if kind in (_CONTROL, _USER_DEFINED):
            special = kind == _CONTROL
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(
                [AddedToken(token, special=special, normalized=False)]
            )

    def token_at(name: str) -> str | None:
        index = file.meta.get(f"tokenizer.ggml.{name}_token_id")
        return None if index is None else tokens[index]

    bos = token_at("bos")
    if file.meta.get("tokenizer.ggml.add_bos_token") and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokens.index(bos))]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=token_at("eos"),
        pad_token=token_at("padding"),
        unk_token=token_at("unknown"),
        clean_up_tokenization_spaces=False,
        model_max_length=file.require(f"{file.architecture}.context_length"),
    )
    fast.chat_template = file.meta.get("tokenizer.chat_template")
    return fast


def convert_gguf(source: str | Path, folder: str | Path) -> None:
    """Write the Hugging Face folder of a GGUF file: config, generation config, float32 weights, tokenizer, template.

    The folder must exist; it is filled, not made whole at once (`files.whole_folder` does that for the cache).

    Raises:
        ModelError: see `GGUFFile`, `read_config`, `read_weights`, `read_tokenizer`. OSError: the disk is full.
    """
    file, folder = GGUFFile(source), Path(folder)
    config = read_config(file)
    tokenizer = read_tokenizer(file)
    state = read_weights(file, config)
    config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
