"""Schedules and steps by value, decay, clipping, fp32 masters under bf16, exact resume, refusals."""

import io
import math

import pytest
import torch
from torch import nn

from forethought.errors import ConfigError
from forethought.learn.optim import OptimConfig, Optimizer
from forethought.models.load import cast_weights
from forethought.models.tiny import tiny_model


def net(*values: float, dtype=torch.float32) -> nn.Module:
    """One matrix [1, n] of these values, and one bias."""
    made = nn.Linear(len(values), 1).to(dtype)
    with torch.no_grad():
        made.weight[:] = torch.tensor(values)
        made.bias.zero_()
    return made


def push(model: nn.Module, weight, bias=0.0) -> None:
    """Backward of a loss whose gradient is exactly this."""
    w = torch.tensor([weight], dtype=model.weight.dtype)
    ((model.weight * w).sum() + (model.bias * bias).sum()).backward()


# -- schedule --
@pytest.mark.parametrize(
    ("config", "total", "wanted"),
    [
        ({"schedule": "constant"}, 4, [1, 1, 1, 1, 1]),
        ({"schedule": "constant", "warmup_steps": 4}, 8, [0.25, 0.5, 0.75, 1, 1, 1]),
        ({"schedule": "linear"}, 4, [1, 0.75, 0.5, 0.25, 0, 0]),
        ({"schedule": "linear", "warmup_steps": 2}, 6, [0.5, 1, 1, 0.75, 0.5, 0.25, 0]),
        ({"schedule": "cosine"}, 4, [1, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125), 0]),
        ({"schedule": "cosine", "warmup_steps": 1}, 3, [1, 1, 0.5, 0, 0]),
        ({"schedule": "linear", "warmup_steps": 5}, 3, [0.2, 0.4, 0.6]),  # shorter than its warm-up
    ],
)
def test_schedule_by_value(config, total, wanted):
    config = OptimConfig(lr=0.5, **config)
    assert [config.factor(step, total) for step in range(len(wanted))] == pytest.approx(wanted)


def test_the_schedule_is_what_a_step_uses():
    model = net(1.0, 1.0)
    optimizer = Optimizer(model, OptimConfig(lr=0.4, schedule="linear", warmup_steps=1), total_steps=3)
    used = []
    for _ in range(3):
        assert optimizer.lr == pytest.approx([0.4, 0.4, 0.2][len(used)])
        push(model, [1.0, -2.0])
        used.append(optimizer.step()["lr"])
    assert used == pytest.approx([0.4, 0.4, 0.2]) and optimizer.step_index == 3


# -- one step --
def test_adamw_by_hand():
    """First step: both moments are corrected to g and g^2, so the update is lr * g / (|g| + eps), after the decay."""
    model = net(1.0, -2.0)
    optimizer = Optimizer(model, OptimConfig(lr=0.1, weight_decay=0.5, eps=0.25, grad_clip=0), total_steps=1)
    push(model, [0.75, -0.25], bias=0.5)
    told = optimizer.step()
    assert told["grad_norm"] == pytest.approx(math.sqrt(0.75**2 + 0.25**2 + 0.5**2))
    want = [1.0 * 0.95 - 0.1 * 0.75 / 1.0, -2.0 * 0.95 + 0.1 * 0.25 / 0.5]
    assert model.weight[0].tolist() == pytest.approx(want, abs=1e-6)
    assert model.bias.tolist() == pytest.approx([-0.1 * 0.5 / 0.75], abs=1e-6)


def test_only_matrices_decay():
    model = tiny_model(20, width=16, heads=2)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = Optimizer(model, OptimConfig(lr=0.1, weight_decay=0.5), total_steps=1)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    assert optimizer.step()["grad_norm"] == 0
    shapes = {p.ndim for p in model.parameters()}
    assert shapes == {1, 2}  # norms, and everything else
    for name, p in model.named_parameters():
        want = before[name] * (0.95 if p.ndim == 2 else 1)
        torch.testing.assert_close(p.detach(), want, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(
    ("clip", "taken"), [(1.0, (0.6, 0.8)), (10.0, (3.0, 4.0)), (0.0, (3.0, 4.0)), (5.0, (3.0, 4.0)), (2.5, (1.5, 2.0))]
)
def test_clipping_by_value(clip, taken):
    """Gradient (3, 4) has norm 5. AdamW hides the size of a first gradient, its moments do not."""
    model = net(1.0, 1.0)
    optimizer = Optimizer(model, OptimConfig(lr=0.1, grad_clip=clip), total_steps=1)
    push(model, [3.0, 4.0])
    assert optimizer.step()["grad_norm"] == pytest.approx(5.0)  # told before it is clipped
    moment = optimizer.adamw.state[model.weight]["exp_avg"][0]
    assert (moment / 0.1).tolist() == pytest.approx(taken, rel=1e-5)


def test_the_norm_is_that_of_all_parameters_together():
    model = net(1.0)
    optimizer = Optimizer(model, OptimConfig(grad_clip=1.0), total_steps=1)
    push(model, [3.0], bias=4.0)
    assert optimizer.step()["grad_norm"] == pytest.approx(5.0)
    moments = [float(optimizer.adamw.state[p]["exp_avg"]) / 0.1 for p in (model.weight, model.bias)]
    assert moments == pytest.approx([0.6, 0.8], rel=1e-5)


def test_frozen_parameters_and_those_without_a_gradient_stay():
    model = net(1.0, 2.0)
    model.bias.requires_grad_(False)
    model.spare = nn.Parameter(torch.ones(2, 2))
    optimizer = Optimizer(model, OptimConfig(lr=0.1, weight_decay=0.5), total_steps=1)
    assert optimizer.names == ["weight", "spare"] and list(optimizer.master_state()) == optimizer.names
    push(model, [1.0, 1.0])
    optimizer.step()
    assert model.bias.tolist() == [0.0] and torch.equal(model.spare, torch.ones(2, 2))
    assert all(p.grad is None for p in model.parameters())


# -- bf16 --
def test_small_steps_are_kept_under_bf16():
    """A step of 1e-5 is far below bf16's spacing of 0.0078 at 1, and 100 of them are not: the masters add them up."""
    runs = {}
    for compute in (torch.float32, torch.bfloat16):
        model = net(1.0, -1.5)
        optimizer = Optimizer(model, OptimConfig(lr=1e-5), total_steps=100, compute=compute)
        for _ in range(100):
            push(model, [1.0, -2.0])
            optimizer.step()
        runs[compute] = optimizer.master_state()["weight"]
        assert model.weight.dtype == compute and runs[compute].dtype == torch.float32
        assert torch.equal(model.weight.detach(), runs[compute].to(compute))
    assert runs[torch.bfloat16][0].tolist() == pytest.approx([0.999, -1.499], abs=1e-5)
    assert torch.equal(runs[torch.bfloat16], runs[torch.float32])


def test_accumulation_under_bf16_loses_nothing():
    """300 micro-batches with gradient 1: a sum in bf16 stops at 256."""
    model = net(1.0)
    optimizer = Optimizer(model, OptimConfig(grad_clip=0), total_steps=1, compute=torch.bfloat16)
    for _ in range(300):
        push(model, [1.0])
        assert model.weight.grad is None
    assert optimizer.step()["grad_norm"] == 300
    lost = torch.zeros(1, dtype=torch.bfloat16)
    for _ in range(300):
        lost += 1
    assert lost.item() == 256


def test_bf16_follows_the_fp32_run():
    def run(compute):
        model = tiny_model(20, width=32, init_std=0.2)
        optimizer = Optimizer(model, OptimConfig(lr=1e-3), total_steps=10, compute=compute)
        ids = torch.tensor([[3, 7, 5, 11, 2, 9], [4, 4, 8, 15, 16, 2]])
        losses = []
        for _ in range(10):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses, optimizer.master_state()

    (exact, wanted), (rounded, found) = run(torch.float32), run(torch.bfloat16)
    assert rounded == pytest.approx(exact, rel=0.02) and exact[-1] < 0.9 * exact[0]
    for name, master in found.items():
        assert float((master - wanted[name]).abs().mean()) < 1e-3, name


def test_buffers_keep_their_precision():
    """Rotary frequencies rounded to bf16 are off by radians after 3000 tokens; loading in bf16 does not round them."""
    model = tiny_model(20, width=64, heads=1, context=4096)
    before = {n: b.clone() for n, b in model.named_buffers()}
    assert any("inv_freq" in n for n in before)
    Optimizer(model, OptimConfig(), total_steps=1, compute=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(b.dtype == before[n].dtype and torch.equal(b, before[n]) for n, b in model.named_buffers())
    turned = before["model.rotary_emb.inv_freq"] * 3000
    rounded = before["model.rotary_emb.inv_freq"].bfloat16().float() * 3000
    assert float((turned - rounded).abs().max()) > 1  # radians


def test_a_tied_weight_is_one_master():
    model = tiny_model(20, width=32, tie=True)
    optimizer = Optimizer(model, OptimConfig(lr=0.01), total_steps=1, compute=torch.bfloat16)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert "lm_head.weight" not in optimizer.names and len(optimizer.names) == len(list(model.parameters()))
    ids = torch.tensor([[3, 7, 5]])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert torch.equal(model.lm_head.weight, optimizer.master_state()["model.embed_tokens.weight"].bfloat16())


# -- resume --
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_state_round_trip_is_bitwise(compute):
    config = OptimConfig(lr=0.01, weight_decay=0.1, schedule="cosine", warmup_steps=2, grad_clip=0.5)
    ids = torch.tensor([[3, 7, 5, 11, 2, 9]])

    def make(seed):
        model = tiny_model(20, width=32, seed=seed)
        return model, Optimizer(model, config, total_steps=8, compute=compute)

    def go(model, optimizer, steps):
        told = []
        for _ in range(steps):
            model(input_ids=ids, labels=ids).loss.backward()
            told.append(optimizer.step())
        return told

    model, optimizer = make(0)
    go(model, optimizer, 3)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    wanted = go(model, optimizer, 5)
    other, resumed = make(1)
    go(other, resumed, 1)  # whatever it has done before is forgotten
    file.seek(0)
    resumed.load_state_dict(torch.load(file))
    assert resumed.step_index == 3
    assert go(other, resumed, 5) == wanted and wanted[-1]["lr"] < wanted[0]["lr"]
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert all(torch.equal(m, resumed.master_state()[n]) for n, m in optimizer.master_state().items())


def test_the_state_of_another_model_is_refused():
    one = Optimizer(tiny_model(20, width=32, layers=1), OptimConfig(), total_steps=1)
    two = Optimizer(tiny_model(20, width=32, layers=2), OptimConfig(), total_steps=1)
    with pytest.raises(ConfigError, match="the checkpoint's trainable parameters are not those of this model"):
        two.load_state_dict(one.state_dict())


# -- refusals --
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_gradient_leaves_everything(compute, bad):
    model = net(1.0, 2.0)
    optimizer = Optimizer(model, OptimConfig(lr=0.1, weight_decay=0.5), total_steps=9, compute=compute)
    push(model, [1.0, 1.0])
    optimizer.step()
    masters = {n: m.clone() for n, m in optimizer.master_state().items()}
    moments = {k: v.clone() for k, v in optimizer.adamw.state[optimizer.masters[0]].items()}
    push(model, [1.0, bad])
    with pytest.raises(
        FloatingPointError, match=r"gradient norm is (nan|inf) at optimiser step 1; the weights were left"
    ):
        optimizer.step()
    assert all(torch.equal(m, masters[n]) for n, m in optimizer.master_state().items())
    assert all(torch.equal(v, moments[k]) for k, v in optimizer.adamw.state[optimizer.masters[0]].items())
    assert torch.equal(model.weight.detach(), masters["weight"].to(compute)) and optimizer.step_index == 1
    assert all(p.grad is None for p in (*model.parameters(), *optimizer.masters))
    push(model, [3.0, 4.0])
    assert optimizer.step()["grad_norm"] == pytest.approx(5.0)  # nothing of the bad gradient is left


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"lr": 0}, "lr=0: give a positive number"),
        ({"lr": math.nan}, "lr=nan"),
        ({"lr": math.inf}, "lr=inf"),
        ({"weight_decay": -1}, "weight_decay=-1"),
        ({"beta1": 1.0}, "beta1=1.0, beta2=0.999"),
        ({"eps": 0}, "eps=0"),
        ({"grad_clip": -1}, "grad_clip=-1"),
        ({"weight_decay": math.nan}, "weight_decay=nan"),
        ({"eps": math.nan}, "eps=nan"),
        ({"grad_clip": math.inf}, r"grad_clip=inf: give 0 \(off\)"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"schedule": "step"}, "schedule='step': 'constant', 'linear' or 'cosine'"),
        ({"lr": -1, "eps": -1}, "lr=-1.*; eps=-1"),
    ],
)
def test_config_refuses(kwargs, message):
    with pytest.raises(ConfigError, match=f"optim: .*{message}"):
        OptimConfig(**kwargs)


def test_models_that_cannot_be_trained_are_refused():
    with pytest.raises(ConfigError, match="no trainable parameter"):
        Optimizer(net(1.0).requires_grad_(False), OptimConfig(), total_steps=1)
    with pytest.raises(ConfigError, match="master weights are fp32, but the model holds torch.bfloat16"):
        Optimizer(net(1.0, dtype=torch.bfloat16), OptimConfig(), total_steps=1)


def test_a_later_optimizer_of_the_same_model_gets_the_gradients():
    """The demo trains several arms on one model: each arm's optimiser must be the one that learns."""
    model = tiny_model(20, width=32)
    first = Optimizer(model, OptimConfig(lr=0.1), total_steps=1, compute=torch.bfloat16)
    cast_weights(model, torch.float32)
    second = Optimizer(model, OptimConfig(lr=0.1), total_steps=1, compute=torch.bfloat16)
    start = {n: w.clone() for n, w in second.master_state().items()}
    model(torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
    assert second.step()["grad_norm"] > 0
    assert any(bool((w != start[n]).any()) for n, w in second.master_state().items())
    assert all(m.grad is None for m in first.masters)


def test_reset_begins_anew_on_the_weights_as_they_are():
    model = torch.nn.Linear(2, 1)
    used = Optimizer(model, OptimConfig(lr=0.1, schedule="linear"), total_steps=4)
    for _ in range(3):
        model(torch.ones(2)).sum().backward()
        used.step()
    model(torch.ones(2)).sum().backward()
    weights = {n: m.clone() for n, m in used.master_state().items()}
    used.reset(2)
    assert used.lr == 0.1 and not used.adamw.state and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(m, weights[n]) for n, m in used.master_state().items())
    fresh = torch.nn.Linear(2, 1)
    fresh.load_state_dict(model.state_dict())
    other = Optimizer(fresh, OptimConfig(lr=0.1, schedule="linear"), total_steps=2)
    for _ in range(2):
        for module, optimizer in ((model, used), (fresh, other)):
            module(torch.ones(2)).sum().backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


def test_warm_up_as_a_share_of_the_steps():
    config = OptimConfig(lr=1.0, warmup_ratio=0.1, schedule="linear")
    assert [config.factor(s, 20) for s in (0, 1, 2, 11, 20)] == [0.5, 1.0, 1.0, 0.5, 0.0]
    with pytest.raises(ConfigError, match="give one of them"):
        OptimConfig(warmup_ratio=0.1, warmup_steps=3)
    with pytest.raises(ConfigError, match="warmup_ratio=1"):
        OptimConfig(warmup_ratio=1.0)
