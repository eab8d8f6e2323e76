"""Two gloo processes make the same optimiser step as one; an error on one is an error on both, never a hang.

The file is its own worker: `python test_distributed.py FOLDER` under WORLD_SIZE, RANK, MASTER_ADDR and MASTER_PORT,
which is what torchrun and `accelerate launch` set.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from forethought.errors import DataError, ForethoughtError
from forethought.learn.distributed import Distributed
from forethought.learn.learner import Learner, Targets
from forethought.learn.losses import LossOut, entropy_bonus, policy_loss
from forethought.learn.offline import SFTConfig, SFTTrainer, sft_objective
from forethought.learn.optim import OptimConfig
from forethought.models.policy import Policy
from forethought.tree.tree import TokenTree
from tinymodels import IntTokenizer, tiny

OPTIM = OptimConfig(lr=1e-3, weight_decay=0.1, grad_clip=0.5, eps=1e-6)
REDUCTIONS = ("token-mean", "sequence-mean", "dr-grpo")


def forest() -> list[TokenTree]:
    """Five trees of very different sizes; a shared span of weight 3, two-turn paths, all columns filled."""
    trees = []
    for number, ends in enumerate(([3, 9, 1], [2], [12, 5, 7, 4], [1, 1], [6])):
        tree = TokenTree([5 + number, 6, 7], task=str(number))
        if len(ends) > 2:
            middle = tree.add(0, [20 + number, 21], sampled=True, logprobs=[-1.5, -2.5])
            tree.weight[tree.span(middle)] = len(ends)
        else:
            middle = tree.add(0, [30])
        for place, size in enumerate(ends):
            ids = [(11 * number + 7 * place + 3 * i) % 90 + 3 for i in range(size)]
            node = tree.add(middle, ids, sampled=True, logprobs=np.linspace(-4, -2, size))
            tree.weight[tree.span(node)] = 1
            tree.advantage[tree.span(node)] = (1.0, -1.5, 0.5, 2.0)[place]
        tree.advantage[tree.span(middle)] = 0.25
        trees.append(tree)
    return trees


def objective(t: Targets) -> LossOut:
    """Clipped policy loss and entropy bonus, with metrics of both kinds (sums and a maximum)."""
    assert t.entropy is not None
    out = policy_loss(t.logp, t.behaviour, t.advantage, t.coef, metric_coef=t.share)
    bonus = entropy_bonus(t.entropy, t.coef)
    return LossOut(out.loss + 0.01 * bonus.loss, out.metrics | entropy_bonus(t.entropy.detach(), t.share).metrics)


def learner(seed: int = 0, **kwargs) -> Learner:
    return Learner(Policy(tiny("llama", seed), IntTokenizer()), OPTIM, total_steps=4, **{"micro_tokens": 24, **kwargs})


def masters(made: Learner) -> dict[str, torch.Tensor]:
    return {n: m.clone() for n, m in made.optimizer.master_state().items()}


def train(deal: Callable[[list[TokenTree]], list[TokenTree]], reduction="token-mean", steps=3, **kwargs):
    """(metrics of each step, weights, tokens counted) of a few updates on this process's trees."""
    made = learner(**kwargs)
    rows = [
        made.update(deal(forest()), objective, reduction=reduction, max_length=16, entropy=True) for _ in range(steps)
    ]
    return rows, masters(made), made.tokens_trained


def sft():
    """Five records in batches of two: the last batch of each epoch is too small for two processes."""
    policy = Policy(tiny("llama"), IntTokenizer())
    trainer = SFTTrainer(policy, forest(), SFTConfig(batch_size=2, epochs=2, seed=3, optim=OPTIM))
    rows = [trainer.train_step()[0] for _ in range(trainer.total)]
    return rows, masters(trainer.learner), trainer.counts["tokens_trained"]


def with_unused():
    """A parameter that no process uses, under weight decay."""
    policy = Policy(tiny("llama"), IntTokenizer())
    policy.model.register_parameter("spare", torch.nn.Parameter(torch.ones(2, 2)))
    made = Learner(policy, OPTIM, total_steps=1)
    rows = [made.update(made.distributed.share(forest()), objective, entropy=True)]
    return rows, masters(made), made.tokens_trained


# -- the worker --
def failure(made: Learner, trees: list[TokenTree], loss=objective) -> tuple[str, str, bool]:
    """(kind, message, were the weights left alone) of an update that must fail."""
    before = masters(made)
    try:
        made.update(trees, loss, entropy=True)
    except Exception as error:
        same = all(torch.equal(m, before[n]) for n, m in masters(made).items())
        clean = all(p.grad is None for p in made.policy.model.parameters())
        return type(error).__name__, str(error), same and clean
    return "none", "", False


class Odd(Exception):
    """Needs two arguments, so it does not survive pickling."""

    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


def failures(spread: Distributed) -> dict[str, tuple[str, str, bool]]:
    mine = spread.rank == 1
    calls = 0

    def nan(t: Targets) -> LossOut:
        return LossOut(t.logp.sum() * float("nan") if mine else objective(t).loss)

    def late(t: Targets) -> LossOut:  # in the second micro-batch, when gradients of the first are there
        nonlocal calls
        calls += 1
        if mine and calls == 2:
            raise Odd("no", "good")
        return objective(t)

    def steep(t: Targets) -> LossOut:  # finite, with an infinite gradient
        return LossOut((t.logp - t.logp.detach()).abs().sqrt().sum() if mine else objective(t).loss)

    made = learner(micro_tokens=20)
    trees = [forest()[0], forest()[4]] if mine else forest()[1:4]
    out = {
        "loss": failure(made, trees, nan),
        "own": failure(made, trees, late),
        "gradient": failure(made, trees, steep),
    }
    bad = forest()[:2]
    if mine:
        bad[0].advantage[4] = np.nan
    out["advantage"] = failure(made, bad)
    heavy = forest()[:1]
    if mine:
        heavy[0].weight[-1] = np.inf
    out["weight"] = failure(made, heavy)
    out["empty"] = failure(made, [TokenTree([5, 6])])
    return out | {"after": (made.update(spread.share(forest()), objective, entropy=True), masters(made))}  # type: ignore


def work(folder: Path) -> None:
    torch.set_num_threads(1)
    spread = Distributed()
    assert spread.world == 2 and spread.main == (spread.rank == 0)
    out: dict = {"sum": spread.sum(1.5 + spread.rank), "gather": spread.gather({"rank": spread.rank})}
    for reduction in REDUCTIONS:
        out[reduction] = train(spread.share, reduction)
        out[reduction, "one"] = train(lambda trees: trees[2:3] if spread.rank == 1 else [], reduction)
    out["unequal"] = train(lambda trees: trees[:4] if spread.main else trees[4:])
    out["fresh"] = train(spread.share, seed=spread.rank)  # other weights on every process, as fresh adapters have
    out["bf16"] = train(spread.share, compute=torch.bfloat16)
    out["sft"], out["unused"] = sft(), with_unused()
    out["failures"] = failures(spread)
    spread.barrier()
    torch.save(out, folder / f"{spread.rank}.pt")


# -- the tests --
def launch(folder: Path, processes: int = 2) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here = Path(__file__)
    running = []
    for rank in range(processes):
        env = {**os.environ, "WORLD_SIZE": str(processes), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        env["PYTHONPATH"] = os.pathsep.join([str(here.parents[1]), *sys.path])
        running.append(
            subprocess.Popen([sys.executable, str(here), str(folder)], env=env, stderr=subprocess.PIPE, text=True)
        )
    try:
        said = [p.communicate(timeout=120)[1] for p in running]
    except subprocess.TimeoutExpired:
        pytest.fail("the processes wait for each other")
    finally:
        for p in running:
            if p.poll() is None:
                p.kill()
                p.wait()
    assert all(p.returncode == 0 for p in running), "\n".join(said)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    launch(folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def assert_same(found, wanted, *, exact=False):
    rows, weights, tokens = found
    want_rows, want_weights, want_tokens = wanted
    for got, want in zip(rows, want_rows, strict=True):
        names = {n for n in want if not n.startswith("time/") and n != "tokens/packed"}
        assert names == {n for n in got if not n.startswith("time/") and n != "tokens/packed"}
        for name in names:
            tolerance = dict(rel=0, abs=0) if exact else dict(rel=1e-5, abs=1e-6)
            assert got[name] == pytest.approx(want[name], **tolerance), name
    assert tokens == want_tokens
    assert weights.keys() == want_weights.keys()
    for name, want in want_weights.items():
        torch.testing.assert_close(
            weights[name], want, atol=0 if exact else 1e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_one_step(ranks, key, wanted):
    """Each process has the step of one process, and both have the same bits."""
    for rank in ranks:
        assert_same(rank[key], wanted)
    assert_same(ranks[1][key], ranks[0][key], exact=True)


def test_sums_and_values_of_all(ranks):
    assert [r["sum"] for r in ranks] == [4.0, 4.0]
    assert all(r["gather"] == [{"rank": 0}, {"rank": 1}] for r in ranks)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_two_processes_make_the_step_of_one(ranks, reduction):
    wanted = train(list, reduction)
    start = masters(learner())
    assert max(float((m - start[n]).abs().max()) for n, m in wanted[1].items()) > 1e-3  # the weights did move
    assert wanted[0][0]["tokens/trained"] == 55 and wanted[0][0]["ratio/max"] > 1
    assert_one_step(ranks, reduction, wanted)
    assert all(row["tokens/packed"] >= 55 for row in ranks[0][reduction][0])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_process_without_trees_takes_part(ranks, reduction):
    assert_one_step(ranks, (reduction, "one"), train(lambda trees: trees[2:3], reduction))


def test_how_the_trees_are_dealt_out_does_not_matter(ranks):
    wanted = train(list)
    assert_one_step(ranks, "unequal", wanted)


def test_weights_that_differ_at_the_start_are_those_of_process_0(ranks):
    assert_one_step(ranks, "fresh", train(list, seed=0))


def test_bf16_processes_stay_together(ranks):
    assert_same(ranks[1]["bf16"], ranks[0]["bf16"], exact=True)
    (rows, weights, _), (want, exact, _) = ranks[0]["bf16"], train(list, compute=torch.bfloat16)
    assert rows[0]["loss"] == pytest.approx(want[0]["loss"], rel=0.02)
    assert all(float((weights[n] - exact[n]).abs().max()) < 4e-3 for n in exact)  # a step moves a weight by 1e-3


def test_sft_over_epochs_with_short_batches(ranks):
    assert_one_step(ranks, "sft", sft())


def test_a_parameter_that_nobody_uses_is_left_alone(ranks):
    wanted = with_unused()
    assert torch.equal(wanted[1]["spare"], torch.ones(2, 2))
    assert_one_step(ranks, "unused", wanted)


@pytest.mark.parametrize(
    ("case", "kinds", "message"),
    [
        ("loss", ("FloatingPointError", "FloatingPointError"), "the loss is nan; no weight was changed"),
        ("gradient", ("FloatingPointError", "FloatingPointError"), "the gradient norm is nan at optimiser step 0"),
        ("own", ("ForethoughtError", "Odd"), "no good"),
        ("advantage", ("DataError", "DataError"), "advantage is nan"),
        ("weight", ("DataError", "DataError"), "a token weight is NaN, infinite or negative"),
        ("empty", ("DataError", "DataError"), "nothing to train on"),
    ],
)
def test_an_error_of_one_process_stops_both(ranks, case, kinds, message):
    """Process 1 fails alone; process 0 says which one did, and nothing changed on either."""
    for rank, kind in enumerate(kinds):
        found, said, untouched = ranks[rank]["failures"][case]
        assert found == kind and message in said and untouched
        assert said.startswith("process 1: ") == (rank == 0 and case not in ("gradient", "empty"))


def test_the_processes_go_on_after_errors(ranks):
    made = learner(micro_tokens=20)
    rows = [made.update(forest(), objective, entropy=True)]
    for rank in ranks:
        after, weights = rank["failures"]["after"]
        assert_same(([after], weights, 55), (rows, masters(made), 55))


def test_one_process_raises_as_it_is():
    alone = Distributed()
    assert alone.world == 1 and alone.share([1, 2, 3]) == [1, 2, 3] and alone.gather("a") == ["a"]
    with pytest.raises(Odd, match="no good"), alone.together():
        raise Odd("no", "good")
    with alone.together():
        pass
    assert issubclass(DataError, ForethoughtError)


def test_an_error_in_a_later_micro_batch_leaves_no_gradient():
    """What the first micro-batch added must not be part of the next step."""
    made, clean = learner(micro_tokens=20), learner(micro_tokens=20)
    calls = 0

    def late(t: Targets) -> LossOut:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ValueError("stop here")
        return sft_objective(t)

    with pytest.raises(ValueError, match="stop here"):
        made.update(forest(), late)
    assert calls == 2 and made.tokens_trained == 0
    for each in (made, clean):
        each.update(forest(), sft_objective)
    assert all(torch.equal(m, masters(clean)[n]) for n, m in masters(made).items())


if __name__ == "__main__":
    work(Path(sys.argv[1]))
