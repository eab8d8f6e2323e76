"""Writes small GGUF files, in the way llama.cpp's converter does, for tests of reading and fetching them."""

import gguf
import numpy as np
from tokenizers import pre_tokenizers

from forethought.models.gguf import to_interleaved
from forethought.models.tiny import tiny_model

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
PAIRS = ["1 2", "Ġ Ġ", "Ġ 7", "Ċ Ċ", "a b"]
TOKENS = SPECIALS + ALPHABET + [p.replace(" ", "") for p in PAIRS]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def twin(family="llama", **kw):
    """The model whose weights the file holds."""
    return tiny_model(len(TOKENS), family=family, width=64, layers=2, heads=4, kv_heads=2, init_std=0.2, **kw)


def write(
    path,
    model=None,
    *,
    kind="F32",
    arch=None,
    permute=None,
    pre="smollm",
    tokenizer="gpt2",
    extra=None,
    drop=(),
    more=(),
    add_bos=False,
):
    """Write `model` as GGUF; matrices as `kind`, vectors as F32. `extra`: further metadata; `drop`, `more`: tensors."""
    model = model if model is not None else twin()
    config = model.config
    arch = arch or config.model_type
    permute = arch == "llama" if permute is None else permute
    w = gguf.GGUFWriter(str(path), arch)
    w.add_context_length(config.max_position_embeddings)
    w.add_embedding_length(config.hidden_size)
    w.add_block_count(config.num_hidden_layers)
    w.add_feed_forward_length(config.intermediate_size)
    w.add_head_count(config.num_attention_heads)
    w.add_head_count_kv(config.num_key_value_heads)
    w.add_layer_norm_rms_eps(config.rms_norm_eps)
    w.add_rope_freq_base(config.rope_parameters["rope_theta"])
    w.add_tokenizer_model(tokenizer)
    if pre is not None:
        w.add_tokenizer_pre(pre)
    w.add_token_list(TOKENS)
    w.add_token_types([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)))
    w.add_token_merges(PAIRS)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_pad_token_id(2)
    w.add_unk_token_id(0)
    w.add_add_bos_token(add_bos)
    w.add_chat_template(TEMPLATE)
    for key, value in (extra or {}).items():
        (w.add_string if isinstance(value, str) else w.add_uint32)(key, value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, suffix = name.rsplit(".", 1)
        block = f"blk.{stem.split('.')[2]}." if stem.startswith("model.layers.") else ""
        short = block + NAMES[stem.split(".", 3)[3] if block else stem]
        if f"{short}.{suffix}" in drop:
            continue
        values = tensor.numpy()
        if permute and "attn_q" in short:
            values = to_interleaved(values, config.num_attention_heads)
        if permute and "attn_k" in short:
            values = to_interleaved(values, config.num_key_value_heads)
        stored = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        w.add_tensor(f"{short}.{suffix}", gguf.quantize(np.ascontiguousarray(values), stored), raw_dtype=stored)
    for name in more:
        w.add_tensor(name, np.zeros(4, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path
