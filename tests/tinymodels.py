"""Random models of every family that the core must carry, made on the spot."""

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

BASE = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=2,
)
# Sliding windows are shorter than the sequences of the tests; soft caps are low enough to bite.
CONFIGS = {
    "llama": lambda: LlamaConfig(**BASE, head_dim=8, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**BASE, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**BASE, head_dim=8, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "gemma2": lambda: Gemma2Config(
        **BASE,
        head_dim=8,
        sliding_window=5,
        final_logit_softcapping=5.0,
        attn_logit_softcapping=3.0,
        query_pre_attn_scalar=8,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **BASE,
        head_dim=8,
        sliding_window=5,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "phi3": lambda: Phi3Config(**BASE, sliding_window=6),
    "mistral": lambda: MistralConfig(**BASE, head_dim=8, sliding_window=5),
}


class IntTokenizer:
    """Ids are words: enough of a tokenizer for engines."""

    eos_token_id = 1
    pad_token_id = 0

    def decode(self, ids, **_):
        return "".join(f"<{i}>" for i in ids)

    def save_pretrained(self, folder):
        """Nothing to save."""


def tiny(family: str, seed: int = 0):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]()).eval()
    with torch.no_grad():  # far from uniform, so that differences show
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(3)
    return model
