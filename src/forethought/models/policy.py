"""Policy: a causal language model with its tokenizer, seen through token trees.

It runs packed batches through the model's own modules (`attention.TreeContext`) and returns log-probs of targets
without ever holding [tokens, vocabulary] for the whole batch. Models whose attention cannot be routed fall back to
linear rows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from forethought.errors import ModelError
from forethought.models import attention
from forethought.models.head import chunked_logprobs
from forethought.tree.pack import Batch, Layout, pack
from forethought.tree.tree import TokenTree


class Policy:
    """A model that is sampled from and trained.

    Args:
        model: any transformers causal LM, or a peft model around one.
        tokenizer: its tokenizer.
        layout: "tree" or "linear"; None takes "tree" where the model's attention can be routed and gives the same
            log-probs as a plain forward (checked on a small tree when the policy is made), else "linear".
        end_ids: further tokens that end a response, such as a chat template's end of turn (`ChatRenderer.end_ids`);
            those of the tokenizer and of the generation config are known without it.

    Raises:
        ModelError: layout="tree" was asked for and the model cannot do it.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, *, layout: Layout | None = None, end_ids: Iterable[int] = ()):
        self.model = model
        self.tokenizer = tokenizer
        unwrap = getattr(model, "get_base_model", None)  # peft's
        self.core: Any = model if unwrap is None else unwrap()
        self.decoder: nn.Module = self.core.get_decoder()
        self.head: nn.Module = self.core.get_output_embeddings()
        if hasattr(self.head, "lora_A"):
            raise ModelError(
                "LoRA on the output projection is not supported: leave lm_head out of the adapter's targets"
            )
        self.configs = attention.configs_of(self.core)
        config = self.core.config
        self.config = config
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        # Granite divides its logits, Cohere multiplies them.
        self.logit_scale: float = getattr(config, "logit_scale", None) or 1.0 / (
            getattr(config, "logits_scaling", None) or 1
        )
        self.context: int = int(getattr(config, "max_position_embeddings", None) or 2**31)
        self.eos_ids: tuple[int, ...] = self._end_ids(end_ids)
        self.pad_id: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (self.eos_ids or (0,))[0]
        if layout != "linear":
            problem = self._tree_problem()
            if problem and layout == "tree":
                raise ModelError(f"{type(self.core).__name__}: {problem}; use layout='linear'")
            layout = "linear" if problem else "tree"
        self.layout: Layout = layout

    def _end_ids(self, further: Iterable[int]) -> tuple[int, ...]:
        """All end tokens, each once: the tokenizer's, the generation config's (one or a list), the caller's."""
        config = getattr(self.core.generation_config, "eos_token_id", None)
        listed = config if isinstance(config, (list, tuple)) else [config]
        every = [self.tokenizer.eos_token_id, *listed, *further]
        return tuple(dict.fromkeys(int(token) for token in every if token is not None))

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype  # type: ignore[return-value]

    # -- forward --
    def hidden(self, batch: Batch, *, context: attention.TreeContext | None = None) -> torch.Tensor:
        """Final hidden states [N, D] of the packed tokens."""
        if self.layout == "linear":
            ids, mask, flat = batch.padded(self.pad_id)
            out = self.decoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
            return out.flatten(0, 1).index_select(0, flat)
        with attention.using(self.configs, context or attention.TreeContext(batch)):
            out = self.decoder(input_ids=batch.ids[None], position_ids=batch.positions[None], use_cache=False)
        return out.last_hidden_state[0]

    def logprobs(
        self, batch: Batch, *, temperature: float = 1.0, entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs [M] of the targets under softmax(logits / temperature), and their entropies [M] if asked."""
        hidden = self.hidden(batch).index_select(0, batch.predecessors)
        return self.head_logprobs(hidden, batch.targets, temperature=temperature, entropy=entropy)

    def head_logprobs(
        self, hidden: torch.Tensor, ids: torch.Tensor, *, temperature: float = 1.0, entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return chunked_logprobs(
            hidden,
            self.head.weight,  # type: ignore[arg-type]
            ids,
            bias=getattr(self.head, "bias", None),
            temperature=temperature / self.logit_scale if self.softcap is None else temperature,
            softcap=self.softcap,
            entropy=entropy,
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, D] -> float32 [R, V], as the model itself would give them."""
        out = self.head(hidden).float()
        if self.logit_scale != 1.0:
            out = out * self.logit_scale
        if self.softcap is not None:
            out = torch.tanh(out / self.softcap) * self.softcap
        return out

    @torch.no_grad()
    def score_tokens(
        self, trees: Sequence[TokenTree], *, temperature: float = 1.0, max_tokens: int | None = 8192
    ) -> list[tuple[Batch, torch.Tensor]]:
        """Log-probs of all tokens with weight > 0, as (batch, [M]) pairs; `pack.write_back` stores them in a column.

        Without dropout, whatever mode the model is in.
        """
        self.model.eval()
        return [
            (batch, self.logprobs(batch.to(self.device), temperature=temperature)[0])
            for batch in pack(trees, layout=self.layout, max_tokens=max_tokens)
        ]

    def frozen_copy(self) -> Policy:
        """The policy as it is now, without gradients: a copy of the weights, or with LoRA the base model itself."""
        fresh = all(not bool(p.any()) for n, p in self.model.named_parameters() if "lora_B" in n)
        if hasattr(self.model, "disable_adapter") and fresh:  # an adapter that was trained before is part of the policy
            return _AdapterOff(self.model, self.tokenizer, layout=self.layout, end_ids=self.eos_ids)
        model = copy.deepcopy(self.model).requires_grad_(False).eval()
        return Policy(model, self.tokenizer, layout=self.layout, end_ids=self.eos_ids)

    # -- can this model do trees? --
    @torch.no_grad()
    def _tree_problem(self) -> str | None:
        if not getattr(type(self.core), "_supports_attention_backend", False):
            return "its attention cannot be routed by name"
        vocab = int(self.config.get_text_config().vocab_size)
        tree = TokenTree([i % vocab for i in (5, 3, 11, 7)])
        paths = [tree.add(0, [i % vocab for i in ids]) for ids in ((2, 9, 4), (8, 6, 13))]
        tree.weight[4:] = 1
        training = self.model.training
        self.model.eval()
        try:
            batch = pack([tree])[0].to(self.device)
            self.layout = "tree"
            got = self.logprobs(batch)[0]
            for node in paths:
                ids = torch.tensor([tree.path_ids(node)], device=self.device)
                want = self.core(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
                want = want[3:-1].gather(1, ids[0, 4:, None])[:, 0]
                mine = got[torch.from_numpy((batch.token.cpu().numpy()[:, None] == tree.path_tokens(node)).any(1))]
                tolerance = 1e-3 if self.dtype == torch.float32 else 0.25
                if not torch.allclose(mine, want, atol=tolerance, rtol=0.02):
                    return f"its log-probs over a tree differ from a plain forward by {(mine - want).abs().max():.2g}"
        except (TypeError, RuntimeError, AttributeError) as error:
            return f"its forward does not take a token tree ({error})"
        finally:
            self.model.train(training)
        return None


class _AdapterOff(Policy):
    """A peft policy with its adapter off: the reference of a LoRA run, without a second copy of the weights."""

    def hidden(self, batch: Batch, *, context: attention.TreeContext | None = None) -> torch.Tensor:
        with self.model.disable_adapter():  # type: ignore[operator]
            return super().hidden(batch, context=context)

    def _tree_problem(self) -> str | None:
        return None  # the policy it stands for was checked
