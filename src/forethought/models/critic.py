"""Critic: values of the states that a policy acts in, over packed token trees.

Two kinds. "shared": a linear head on the policy's own trunk, so that one forward gives log-probs and values; whether the
value loss moves the trunk is a switch. "separate": a model of its own with such a head, by default a copy of the
policy's weights. Several named heads give each state one value per reward part.

The value of a token is that of the state BEFORE it: the head reads the hidden state of the token that predicts it. The
state after the last token of a path (needed where an episode was cut) is read at that last token.

Heads begin at zero: the first values are 0, whatever the trunk. Values are fp32.

M targets, D width, K heads.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from forethought import files
from forethought.errors import ConfigError, ModelError
from forethought.models.load import load_model, save_pretrained
from forethought.models.policy import Policy
from forethought.tree.pack import Batch, pack, write_back
from forethought.tree.tree import TokenTree

HEAD_FILE = "value_head.safetensors"
TRUNK_FOLDER = "critic"

Kind = Literal["shared", "separate"]


class Critic:
    """Values [M, K] of packed batches.

    Args:
        policy: whose states are valued.
        kind: see the head of this module.
        heads: names of the values; one head fills the token column "value", several fill "value/<name>".
        trunk_gradient: shared only: let the value loss move the policy's trunk.
        trunk: separate only: the model that is read, with fp32 weights if it is to be trained; by default a copy of the
            policy as it is now (with LoRA: base and adapter are copied, the adapter is trained).

    Raises:
        ConfigError: heads that are empty or not distinct, a trunk for a shared critic. ModelError: the trunk's tokenizer
            is not the policy's.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        kind: Kind = "shared",
        heads: Sequence[str] = ("value",),
        trunk_gradient: bool = True,
        trunk: Policy | None = None,
    ):
        if kind not in ("shared", "separate"):
            raise ConfigError(f"critic kind={kind!r}: give 'shared' or 'separate'")
        if not heads or len(set(heads)) < len(heads) or any(not h for h in heads):
            raise ConfigError(f"critic heads={tuple(heads)!r}: give at least one name, each once")
        if kind == "shared" and trunk is not None:
            raise ConfigError("a shared critic reads the policy's own trunk: leave trunk out, or give kind='separate'")
        self.kind: Kind = kind
        self.heads = tuple(heads)
        self.trunk_gradient = trunk_gradient and kind == "shared"
        if kind == "shared":
            self.trunk = policy
        else:
            if trunk is not None:
                check_tokenizers(policy, trunk)
            self.trunk = trunk or _copy(policy)
            output = self.trunk.head.weight
            if output is not self.trunk.core.get_input_embeddings().weight:
                output.requires_grad_(False)  # nobody reads the critic's words
        width = self.trunk.head.weight.shape[1]  # type: ignore[index]
        self.linear = nn.Linear(int(width), len(self.heads), dtype=torch.float32, device=self.trunk.device)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        own = {"trunk": self.trunk.model} if kind == "separate" else {}
        self.model: nn.Module = nn.ModuleDict({**own, "heads": self.linear})
        """What the critic's optimiser trains: the heads, and the trunk of a separate critic."""

    @property
    def value_columns(self) -> list[str]:
        """Token columns of the values, in the order of the heads."""
        return ["value"] if len(self.heads) == 1 else [f"value/{h}" for h in self.heads]

    @property
    def return_columns(self) -> list[str]:
        """Token columns of the targets, in the order of the heads."""
        return ["return"] if len(self.heads) == 1 else [f"return/{h}" for h in self.heads]

    # -- forward --
    def read(self, hidden: torch.Tensor) -> torch.Tensor:
        """Values [M, K], fp32, of hidden states [M, D] of the trunk."""
        return F.linear(hidden.float(), self.linear.weight.float(), self.linear.bias.float())

    def values(self, batch: Batch) -> torch.Tensor:
        """Values [M, K] of the states before the targets of a packed batch."""
        return self.read(self.trunk.hidden(batch).index_select(0, batch.predecessors))

    @torch.no_grad()
    def score(
        self,
        trees: Sequence[TokenTree],
        ends: Sequence[Sequence[int]],
        *,
        logprob_column: str | None = None,
        temperature: float = 1.0,
        max_tokens: int | None = 8192,
    ) -> list[dict[int, np.ndarray]]:
        """Fill the value columns of every token with weight > 0; one forward, without dropout.

        Args:
            ends: per tree, nodes whose last state is valued too.
            logprob_column: shared only: also store the policy's log-probs (at `temperature`), from the same forward.

        Returns:
            Per tree: node -> values [K] of the state after its last token.

        Raises:
            ConfigError: log-probs asked of a separate critic.
        """
        if logprob_column and self.kind == "separate":
            raise ConfigError("a separate critic has no log-probs of the policy: score the policy itself")
        self.trunk.model.eval()
        last: list[dict[int, np.ndarray]] = [{} for _ in trees]
        for packed in pack(trees, layout=self.trunk.layout, max_tokens=max_tokens, keep=ends):
            batch = packed.to(self.trunk.device)
            states = self.trunk.hidden(batch)
            hidden = states.index_select(0, batch.predecessors)
            values = self.read(hidden)
            for column, name in enumerate(self.value_columns):
                write_back(trees, batch, name, values[:, column])
            if logprob_column:
                logp, _ = self.trunk.head_logprobs(hidden, batch.targets, temperature=temperature)
                write_back(trees, batch, logprob_column, logp)
            here = [(i, n) for i, nodes in enumerate(ends) for n in nodes if (i, n) in batch.places]
            if here:
                where = torch.tensor([_last_token(batch, i, trees[i], n) for i, n in here], device=states.device)
                found = self.read(states.index_select(0, where)).cpu().numpy()
                for (i, n), row in zip(here, found, strict=True):
                    last[i][n] = row
        return last

    # -- checkpoints --
    def save(self, folder: Path | str, *, masters: Mapping[str, torch.Tensor] | None = None) -> None:
        """Add the critic to a checkpoint folder of the policy, which stays a Hugging Face folder.

        The heads go to value_head.safetensors; the trunk of a separate critic to the folder critic/.

        Args:
            masters: weights by name of `model` that stand for its own (fp32 masters of a bf16 model).

        Raises:
            RunError: not writable, or the disk is full.
        """
        from safetensors.torch import save

        folder = Path(folder)
        given = dict(masters or {})
        tensors = {
            name: given.get(f"heads.{name}", p).detach().float().cpu().contiguous()
            for name, p in self.linear.named_parameters()
        }
        about = {"kind": self.kind, "heads": json.dumps(self.heads), "trunk_gradient": json.dumps(self.trunk_gradient)}
        files.make_folder(folder)
        files.write_atomic(folder / HEAD_FILE, save(tensors, metadata=about))
        if self.kind == "separate":
            own = {n.removeprefix("trunk."): t for n, t in given.items() if n.startswith("trunk.")}
            save_pretrained(self.trunk.model, self.trunk.tokenizer, folder / TRUNK_FOLDER, state=own or None)

    @classmethod
    def load(cls, folder: os.PathLike[str] | str, policy: Policy) -> Critic:
        """The critic that `save` put into a checkpoint folder.

        Raises:
            ModelError: there is none, it does not fit the policy, or the tokenizers differ.
        """
        from safetensors import SafetensorError, safe_open

        path = Path(folder) / HEAD_FILE
        if not path.is_file():
            raise ModelError(f"{path}: not found; the folder was saved without a critic")
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no iterator)
            kind, heads = about["kind"], tuple(json.loads(about["heads"]))
            gradient = bool(json.loads(about["trunk_gradient"]))
        except (SafetensorError, KeyError, ValueError) as err:
            raise ModelError(f"{path}: is not a value head of this package: {type(err).__name__}: {err}") from err
        trunk = None
        if kind == "separate":
            model, tokenizer = load_model(
                Path(folder) / TRUNK_FOLDER, dtype=torch.float32, device=policy.device, say=lambda _: None
            )
            trunk = Policy(model, tokenizer, layout=policy.layout, end_ids=policy.eos_ids)
        critic = cls(policy, kind=kind, heads=heads, trunk_gradient=gradient, trunk=trunk)
        for name, own in critic.linear.named_parameters():
            if tensors[name].shape != own.shape:
                raise ModelError(
                    f"{path}: its {name} has shape {tuple(tensors[name].shape)}, this model needs {tuple(own.shape)}: "
                    "the critic belongs to another model"
                )
            own.data.copy_(tensors[name])
        return critic


def _last_token(batch: Batch, index: int, tree: TokenTree, node: int) -> int:
    """Packed index of the last token on the path to `node`, which may be empty itself."""
    while not tree.length[node] and tree.parent[node] >= 0:
        node = int(tree.parent[node])
    return batch.places[index, node][1] - 1


def _copy(policy: Policy) -> Policy:
    model = copy.deepcopy(policy.model)
    return Policy(model, policy.tokenizer, layout=policy.layout, end_ids=policy.eos_ids)


def check_tokenizers(policy: Policy, trunk: Policy) -> None:
    """A critic reads the policy's ids, so both must mean the same by them.

    Raises:
        ModelError: they do not; names a token that differs.
    """
    mine, theirs = _vocabulary(policy.tokenizer), _vocabulary(trunk.tokenizer)
    advice = "the critic reads the policy's token ids, so give one with the same tokenizer"
    if mine != theirs:
        token = min({t for t, _ in mine.items() ^ theirs.items()}, key=lambda t: (mine.get(t, theirs.get(t, 0)), t))
        told = [
            f"token {token!r} is {'absent' if token not in v else v[token]} in the {n}"
            for n, v in (("policy's", mine), ("critic's", theirs))
        ]
        raise ModelError(f"critic and policy have different tokenizers: {' and '.join(told)}; {advice}")
    sizes = [int(p.core.get_input_embeddings().weight.shape[0]) for p in (policy, trunk)]
    if sizes[0] > sizes[1]:
        raise ModelError(f"the policy has {sizes[0]} token ids, the critic embeds {sizes[1]}; {advice}")


def _vocabulary(tokenizer: Any) -> dict[str, int]:
    get = getattr(tokenizer, "get_vocab", None)
    if get is not None:
        return dict(get())
    # A tokenizer without a vocabulary is known by its special tokens alone.
    return {n: int(i) for n in ("eos_token_id", "pad_token_id") if (i := getattr(tokenizer, n, None)) is not None}
