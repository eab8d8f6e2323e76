"""What jobs on a real model share: loading it with its engine and renderer, and judging with intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forethought.models.chat import ChatRenderer
from forethought.models.load import LoRA, choose_device, choose_dtype, load_model
from forethought.models.policy import Policy
from forethought.models.torch_engine import TorchEngine


@dataclass
class Workbench:
    """A loaded model: policy and engine over the same weights, renderer, and the compute precision."""

    policy: Policy
    engine: TorchEngine
    renderer: ChatRenderer
    compute: torch.dtype

    def prompt_ids(self, task: Mapping[str, Any]) -> list[int]:
        return self.renderer.prompt_ids(task["prompt"])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a response, without end tokens."""
        return self.policy.tokenizer.decode(ids, skip_special_tokens=True)


def open_model(
    name: str,
    *,
    device: str | None = None,
    dtype: str | None = None,
    lora: LoRA | None = None,
    train: bool,
    say: Callable[[str], None],
) -> Workbench:
    """Load a model for training (fp32 weights; the learner makes compute copies) or for evaluation (compute dtype).

    `say` gets one line on the device and the precision, with the reason.
    """
    place = choose_device(device)
    compute, reason = choose_dtype(place)
    if dtype is not None:
        compute, reason = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype], "as asked"
    say(f"device {place}, compute in {str(compute).removeprefix('torch.')}: {reason}")
    model, tokenizer = load_model(name, dtype=torch.float32 if train else compute, device=place, lora=lora, say=say)
    renderer = ChatRenderer(tokenizer)
    policy = Policy(model, tokenizer, end_ids=renderer.end_ids)
    return Workbench(policy, TorchEngine(policy), renderer, compute)
