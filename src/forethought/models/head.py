"""The vocabulary projection, fused with log-softmax: log-probs and entropies of chosen tokens without [M, V] logits.

Walks over the vocabulary in chunks. Forward keeps, per row, the running maximum and the running sums of an online
softmax (Milakov & Gimelshein, arXiv 1805.02867); backward makes the chunk's logits again, now with the known
log-normaliser. Memory is M * chunk values instead of M * V.

Why chunks of the vocabulary and not of the rows: the weight's gradient of a chunk is then finished by one matrix
product over all rows (summed in fp32 inside the product, rounded once to the weight's dtype), and a chunk of logits
stays in a core's cache while exp and sum run over it. Why logits are made again: the weight's gradient needs the
gradient of the loss, which forward does not know, and one of four matrix products is cheaper than M * V values of
memory.

Numbers: products run in the dtype of `hidden` (their results are rounded to it, as any `lm_head` does); maximum, exp,
sums, log-probs, entropies and the summed gradient of `hidden` in fp32 (fp64 for fp64 input).

M rows (targets), D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from forethought.errors import ConfigError, DataError

# Logits held at once. On a CPU the fp32 chunk should stay in a core's second-level cache; elsewhere large products win.
_CHUNK_ELEMENTS = {"cpu": 2**20}
_CHUNK_ELEMENTS_DEVICE = 2**25
_MIN_CHUNK = 512


def chunked_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    softcap: float | None = None,
    bias: torch.Tensor | None = None,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs of `ids` under softmax(softcap(hidden @ weight.T + bias) / temperature).

    Gradients flow to `hidden`, `weight` and `bias`, each only where it is asked for: a frozen weight (LoRA) costs no
    weight gradient. A tied embedding is passed as it is; its gradients add up. Rows whose incoming gradient is zero
    take no part in backward, so that rubbish in them cannot leak (and zero-advantage rows cost nothing).

    Args:
        hidden: [M, D] floating point.
        weight: [V, D], same dtype and device.
        ids: [M] integer ids in [0, V).
        temperature: divides the logits before the softmax. At temperature 0 there is no distribution to score.
        entropy: also return the entropies, in nats (differentiable).
        softcap: Gemma's soft cap, logits = softcap * tanh(logits / softcap), before the temperature.
        bias: [V].
        chunk: vocabulary rows per step; None picks a size that suits the device.

    Returns:
        Log-probs [M] and entropies [M] (None if not asked for), fp32 (fp64 for fp64 input).

    Raises:
        ValueError: shapes or dtypes that do not fit. DataError: an id outside the vocabulary.
        ConfigError: temperature, softcap or chunk not positive.
    """
    _check(hidden, weight, ids, temperature, softcap, bias, chunk)
    if chunk is None:
        room = _CHUNK_ELEMENTS.get(hidden.device.type, _CHUNK_ELEMENTS_DEVICE)
        chunk = max(_MIN_CHUNK, room // max(1, len(ids)))
    spec = (float(temperature), softcap, min(chunk, len(weight)), entropy)
    logp, ent = _ChunkedLogprobs.apply(hidden, weight, bias, ids.long(), spec)  # type: ignore[misc]
    return logp, (ent if entropy else None)


def _check(hidden, weight, ids, temperature, softcap, bias, chunk) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or ids.ndim != 1 or hidden.shape[0] != len(ids):
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, ids {tuple(ids.shape)}: "
            "give [M, D], [V, D] and [M]"
        )
    if hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden has width {hidden.shape[1]}, weight has width {weight.shape[1]}: they must agree")
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise ValueError(f"hidden is {hidden.dtype}, weight is {weight.dtype}: cast one of them; one dtype is needed")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype):
        raise ValueError(f"bias is {bias.dtype} {tuple(bias.shape)}: give {weight.dtype} [{len(weight)}]")
    if not temperature > 0:
        raise ConfigError(f"temperature={temperature}: log-probs need a positive one (0 is greedy: score it at 1)")
    if softcap is not None and not softcap > 0:
        raise ConfigError(f"softcap={softcap}: give a positive number or None")
    if chunk is not None and chunk < 1:
        raise ConfigError(f"chunk={chunk}: give at least 1 vocabulary row per step")
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= len(weight)):
        raise DataError(f"ids run from {int(ids.min())} to {int(ids.max())}: they must lie in [0, {len(weight)})")


def _logits(hidden, weight, bias, start, stop, softcap, temperature, buffer) -> torch.Tensor:
    """The chunk's logits [M, stop - start], soft-capped and tempered, in a view of `buffer`."""
    out = buffer[:, : stop - start]
    if hidden.dtype == buffer.dtype:
        torch.mm(hidden, weight[start:stop].T, out=out)
    else:
        out.copy_(hidden @ weight[start:stop].T)
    if bias is not None:
        out.add_(bias[start:stop])
    if softcap is not None:
        out.div_(softcap).tanh_().mul_(softcap)
    if temperature != 1.0:
        out.div_(temperature)
    return out


def _locate(ids: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows have their target in this chunk, and in which column [M] (0 for the others)."""
    inside = (ids >= start) & (ids < stop)
    return inside, torch.where(inside, ids - start, 0)[:, None]


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, ids, spec):
        temperature, softcap, chunk, entropy = spec
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        m = hidden.shape[0]
        top = hidden.new_full((m, 1), torch.finfo(dtype).min / 2, dtype=dtype)  # finite: -inf - -inf would be NaN
        total = hidden.new_zeros((m, 1), dtype=dtype)  # sum of exp(x - top)
        moment = hidden.new_zeros((m, 1), dtype=dtype)  # sum of exp(x - top) * (x - top)
        target = hidden.new_zeros((m, 1), dtype=dtype)
        buffer = hidden.new_empty((m, chunk), dtype=dtype)
        shifted = torch.empty_like(buffer) if entropy else None
        for start in range(0, len(weight), chunk):
            stop = min(start + chunk, len(weight))
            x = _logits(hidden, weight, bias, start, stop, softcap, temperature, buffer)
            inside, column = _locate(ids, start, stop)
            target = torch.where(inside[:, None], x.gather(1, column), target)
            new_top = torch.maximum(top, x.amax(1, keepdim=True))
            shrink = (top - new_top).exp_()
            x.sub_(new_top)
            if shifted is not None:
                y = shifted[:, : stop - start].copy_(x)
                p = x.exp_()
                moment = shrink * (moment + total * (top - new_top)) + torch.linalg.vecdot(p, y)[:, None]
            else:
                p = x.exp_()
            total = total * shrink + p.sum(1, keepdim=True)
            top = new_top
        log_total = total.log()
        lse = top + log_total
        logp = (target - lse)[:, 0]
        ent = (log_total - moment / total)[:, 0] if entropy else logp.new_zeros(0)
        ctx.save_for_backward(hidden, weight, bias, ids, lse[:, 0], ent)
        ctx.spec = spec
        if not entropy:
            ctx.mark_non_differentiable(ent)
        return logp, ent

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads):
        g_logp, g_ent = grads
        hidden, weight, bias, ids, lse, ent = ctx.saved_tensors
        temperature, softcap, chunk, entropy = ctx.spec
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        full = hidden
        with_entropy = entropy and bool((g_ent != 0).any())
        active = g_logp != 0
        if with_entropy:
            active = active | (g_ent != 0)
        kept = None if bool(active.all()) else active.nonzero()[:, 0]
        if kept is not None:
            hidden, ids, lse, g_logp = hidden[kept], ids[kept], lse[kept], g_logp[kept]
            ent, g_ent = (ent[kept], g_ent[kept]) if with_entropy else (ent, g_ent)

        # d logp / d x_v = [v is the target] - p_v; d entropy / d x_v = -p_v (log p_v + entropy).
        # The row factor `scale` is taken out of the [M, chunk] work where it can be: -scale * (p - target).
        scale = (-g_logp / temperature)[:, None]
        grad_hidden = torch.zeros_like(hidden, dtype=lse.dtype) if need_hidden else None
        grad_weight = torch.empty_like(weight) if need_weight else None
        grad_bias = torch.empty_like(bias) if need_bias else None
        outside = torch.ones_like(scale) if with_entropy else scale
        scaled_hidden = (hidden * outside).to(hidden.dtype) if need_weight else None
        buffer = lse.new_empty((len(ids), chunk))
        other = torch.empty_like(buffer) if with_entropy else None
        taken = scale if with_entropy else torch.ones_like(scale)
        for start in range(0, len(weight), chunk):
            stop = min(start + chunk, len(weight))
            x = _logits(hidden, weight, bias, start, stop, softcap, temperature, buffer)
            slope = None
            if softcap is not None:  # d softcap(z) / dz = 1 - (x / softcap)^2
                slope = 1 - (x * (temperature / softcap)).square_()
            x.sub_(lse[:, None])
            factor = None
            if with_entropy:
                factor = torch.add(x, ent[:, None], out=other[:, : stop - start])  # type: ignore[index]
                factor.mul_((-g_ent / temperature)[:, None]).add_(scale)
            p = x.exp_()
            if factor is not None:
                p.mul_(factor)
            # The target's own term before rounding: p - 1 of a confident token would vanish in bf16.
            inside, column = _locate(ids, start, stop)
            p.scatter_add_(1, column, torch.where(inside[:, None], -taken, 0))
            if slope is not None:
                p.mul_(slope)
            low = p.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden.add_(low @ weight[start:stop])
            if grad_weight is not None and scaled_hidden is not None:
                torch.mm(low.T, scaled_hidden, out=grad_weight[start:stop])
            if grad_bias is not None:
                grad_bias[start:stop] = (outside.T @ p)[0]
        if grad_hidden is not None:
            grad_hidden = grad_hidden.mul_(outside).to(full.dtype)
            if kept is not None:
                grad_hidden = torch.zeros_like(full).index_copy_(0, kept, grad_hidden)
        return grad_hidden, grad_weight, grad_bias, None, None
