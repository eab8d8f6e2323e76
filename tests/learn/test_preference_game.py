"""The preference game: one iteration is the planning step, iterates approach the Nash point, baselines run on the same
loop, previous iterates are refreshed and frozen, runs resume exactly, and bad settings are named."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from forethought.errors import ConfigError, DataError, RewardError, RunError
from forethought.learn.game_pairs import win_matrices, win_rates, with_wins
from forethought.learn.optim import OptimConfig
from forethought.learn.pairs import PREVIOUS, REFERENCE
from forethought.learn.preference_game import GameConfig, GameTrainer
from forethought.learn.session import fit
from forethought.models.policy import Policy
from forethought.models.tiny import char_tokenizer, tiny_model
from forethought.models.torch_engine import TorchEngine
from forethought.rewards.oracles import FunctionOracle
from forethought.rewards.pairs import PairCounts
from forethought.rundir import RunDir
from forethought.tree.tree import Stop, TokenTree

P = np.array([[0.5, 0.9, 0.3], [0.1, 0.5, 0.8], [0.7, 0.2, 0.5]])
TOKENIZER = char_tokenizer("abc?", context=16)
LETTERS = TOKENIZER.convert_tokens_to_ids(["a", "b", "c"])


def prefer(task, a, b) -> float:
    """The cycle over the first letters; anything else loses against a letter."""
    i, j = ("abc".find(text[:1]) if text else -1 for text in (a, b))
    if i < 0 or j < 0:
        return 0.5 if i == j else float(i >= 0)
    return float(P[i, j])


class Counting(FunctionOracle):
    def __init__(self, fn=prefer):
        super().__init__(fn, timeout=None)


def policy(seed=0) -> Policy:
    return Policy(
        tiny_model(len(TOKENIZER), width=16, layers=1, heads=2, context=16, seed=seed, init_std=0.2), TOKENIZER
    )


TASKS = [{"id": str(i), "prompt": "?" * (i + 1)} for i in range(4)]


def game(tasks=None, oracle=None, model=None, on_iteration=None, reference=None, **config) -> GameTrainer:
    """Answers of one letter; by default 4 prompts x 8 samples, 16 pairs in batches of 8."""
    config = {
        "prompts_per_iteration": 4,
        "max_new_tokens": 1,
        "keep_truncated": True,
        "batch_size": 8,
        "monitor_prompts": 0,
        "optim": OptimConfig(lr=1e-2),
        **({"eta": 1.0, "tau": 0.3} if config.get("loss", "inpo") == "inpo" and "eta_schedule" not in config else {}),
        **config,
    }
    model = model or policy()
    return GameTrainer(
        model,
        TorchEngine(model),
        tasks or TASKS,
        lambda task: TOKENIZER(task["prompt"], add_special_tokens=False)["input_ids"],
        oracle or Counting(),
        GameConfig(**config),
        on_iteration=on_iteration,
        reference=reference,
    )


def letters(model: Policy, prompt="?") -> np.ndarray:
    """Probabilities of a, b, c as the first token, given that it is one of them."""
    ids = torch.tensor([TOKENIZER(prompt, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        return model.core(input_ids=ids).logits[0, -1][LETTERS].double().softmax(-1).numpy()


def plan(previous, reference, eta, tau):
    logits = P @ previous / eta + tau / eta * np.log(reference) + (1 - tau / eta) * np.log(previous)
    e = np.exp(logits - logits.max())
    return e / e.sum()


def fitted(pairs, previous, reference, eta, tau):
    """The exact minimiser over these pairs, by least squares."""
    rows, targets = [np.ones(3)], [0.0]
    for pair in pairs:
        sides = [LETTERS.index(pair.tree.node_ids(node)[0]) for node in (pair.chosen, pair.rejected)]
        rows.append(np.eye(3)[sides[0]] - np.eye(3)[sides[1]])
        targets.append((2 * pair.p - 1) / (2 * eta))
    v = np.linalg.lstsq(np.array(rows), np.array(targets), rcond=None)[0]
    logits = v + tau / eta * np.log(reference) + (1 - tau / eta) * np.log(previous)
    return np.exp(logits) / np.exp(logits).sum()


def one_iteration(made: GameTrainer) -> list[dict[str, float]]:
    at, out = made.iteration, []
    while made.iteration == at:
        out.append(made.train_step()[0])
    return out


# -- what is learnt ----------------------------------------------------------------------------------------------------


def test_an_iteration_is_the_planning_step_and_iterates_approach_the_nash_point():
    """One prompt, 512 answers, soft labels, nearly minimised."""
    eta, tau = 1.0, 0.3
    made = game(
        TASKS[:1],
        model=policy(seed=1),
        prompts_per_iteration=1,
        samples=400,
        pair_mode="soft",
        batch_size=200,
        epochs=40,
        iterations=5,
        optim=OptimConfig(lr=2e-2, schedule="linear"),
    )
    made.decode = lambda ids: TOKENIZER.decode(ids) if ids[0] in LETTERS else ""  # anything else is no answer
    reference = previous = letters(made.policy)
    nash = reference
    for _ in range(2000):
        nash = plan(nash, reference, eta, tau)
    for _ in range(5):
        first, _ = made.train_step()
        assert first["moved/max"] < 1e-5  # acceptance check 4: D_pi = D_t at the start
        pairs = made._now.pairs
        one_iteration(made)
        new = letters(made.policy)
        assert new == pytest.approx(fitted(pairs, previous, reference, eta, tau), abs=0.01)
        assert new == pytest.approx(plan(previous, reference, eta, tau), abs=0.08)  # what the fit is for all pairs
        previous = new
    assert np.abs(new - nash).max() < 0.06 < 0.15 < np.abs(reference - nash).max()


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": "dpo", "beta": 0.5},
        {"loss": "dpo", "beta": 0.5, "base": "previous"},
        {"loss": "ipo", "beta": 0.3, "pair_mode": "soft"},
        {"loss": "sppo", "beta": 0.3},
        {"loss": "sppo", "beta": 0.3, "pair_mode": "max_min"},
        {"loss": "nash_md", "beta": 0.02, "epochs": 1, "iterations": 12},
        {"loss": "inpo", "eta": 0.5, "tau": 0.1, "pair_mode": "tournament"},
        {"loss": "inpo", "eta": 0.5, "tau": 0.1, "pair_mode": "max_min"},
        {"loss": "inpo", "tau": 0.2, "eta_schedule": "growing"},
    ],
    ids=lambda s: "-".join(map(str, s.values())),
)
def test_every_method_finds_the_best_answer_of_a_plain_order(settings):
    """a beats b beats c, by .9 each: its share rises with every loss and kind of pair."""
    settings = {"iterations": 4, "epochs": 8, **settings}
    rank = lambda text: "abc".find(text[:1]) if text[:1] in "abc" else 3  # noqa: E731
    plain = lambda task, a, b: 0.5 if rank(a) == rank(b) else 0.9 if rank(a) < rank(b) else 0.1  # noqa: E731
    made = game(oracle=Counting(plain), samples=16, **settings)
    before = np.mean([letters(made.policy, t["prompt"])[0] for t in TASKS])
    names = {name for _ in range(made.config.iterations) for line in one_iteration(made) for name in line}
    after = np.mean([letters(made.policy, t["prompt"])[0] for t in TASKS])
    assert after > before + 0.15 and made.step == made.config.total_steps
    assert {"logps/chosen", "margin/policy", "margin/previous", "pairs/p"} <= names


def test_the_base_of_dpo_is_a_switch():
    found = {}
    for base in ("reference", "previous"):
        made = game(loss="dpo", beta=0.5, base=base, iterations=2, samples=16)
        one_iteration(made)
        found[base] = one_iteration(made)[0]
    assert found["previous"]["h/mean"] == pytest.approx(0, abs=1e-5)  # the iteration begins at its base
    assert abs(found["reference"]["h/mean"]) > 0.01


# -- previous iterate, optimiser, data ---------------------------------------------------------------------------------


def test_previous_is_frozen_within_an_iteration_and_refreshed_between():
    made = game(iterations=3, epochs=3, reference=policy(seed=1))
    kept = []
    for _ in range(3):
        first, _ = made.train_step()
        assert first["moved/max"] < 1e-5
        pairs = made._now.pairs
        previous = [p.tree.column(PREVIOUS).copy() for p in pairs]
        model = [p.clone() for p in made.policy.model.parameters()]
        last, _ = made.train_step()
        assert last["moved/max"] > 1e-4 and any(
            not torch.equal(a, b) for a, b in zip(model, made.policy.model.parameters(), strict=True)
        )
        assert all(
            np.array_equal(a, p.tree.column(PREVIOUS), equal_nan=True) for a, p in zip(previous, pairs, strict=True)
        )
        for pair in pairs[:2]:  # the reference is another model throughout, the previous iterate is not
            ids = torch.tensor([pair.tree.path_ids(pair.chosen)])
            tokens = pair.answers()[0]
            with torch.no_grad():
                logp = policy(seed=1).core(input_ids=ids).logits[0, -2].log_softmax(-1)[ids[0, -1]]
            assert pair.tree.column(REFERENCE)[tokens[-1]] == pytest.approx(float(logp), abs=1e-4)
        kept.append(np.mean([p[np.isfinite(p)].mean() for p in previous]))
        while made._now is not None:
            made.train_step()
    assert len({round(k, 4) for k in kept}) == 3


def test_a_changed_policy_is_noticed_before_it_is_learnt_from(monkeypatch):
    made = game()
    real = made._annotate

    def forgetful(pairs):
        real(pairs)
        with torch.no_grad():
            next(made.policy.model.parameters()).mul_(1.5)

    monkeypatch.setattr(made, "_annotate", forgetful)
    with pytest.raises(
        RunError, match="iteration 1: before its first step the policy's log-probs differ from those of"
    ):
        made.train_step()


def test_the_optimiser_is_fresh_in_every_iteration():
    made = game(iterations=2, epochs=2, optim=OptimConfig(lr=1e-2, schedule="linear"))
    rates = []
    for _ in range(2):
        lines = one_iteration(made)
        rates.append([line["lr"] for line in lines])
        assert max(s["step"].item() for s in made.learner.optimizer.adamw.state.values()) == len(lines)
    assert rates[0][0] == rates[1][0] == 1e-2 and rates[0][-1] <= 1e-2 / 2


def test_prompts_are_fresh_until_all_were_used():
    seen = []
    made = game(prompts_per_iteration=2, iterations=4, samples=32)
    real = made._sample
    made._sample = lambda drawn, *a, **k: (seen.append(sorted(drawn)), real(drawn, *a, **k))[1]  # type: ignore[method-assign]
    epochs = [one_iteration(made)[0]["prompts/epoch"] for _ in range(4)]
    assert sorted(seen[0] + seen[1]) == sorted(seen[2] + seen[3]) == [0, 1, 2, 3]
    assert epochs[0] == 0 and epochs[-1] >= 1


def test_what_is_logged():
    oracle = Counting()
    called = []
    made = game(oracle=oracle, iterations=2, monitor_prompts=4, samples=16,
                on_iteration=lambda t, p: called.append((t, p)) or {"mine": 7.0})  # fmt: skip
    lines = one_iteration(made)
    first, last = lines[0], lines[-1]
    assert first["pairs/made"] + first.get("pairs/dropped/pair_identical", 0) <= 32
    assert first["pairs/dropped_share"] == pytest.approx(1 - first["pairs/made"] / 32)
    assert 0 < first["pairs/p"] < 1 and first["completions/mean_length"] == 1
    assert 0 < first["completions/clipped_ratio"] <= 1 and first["logprob_gap/max"] < 1e-4
    assert {"h/mean", "h/target", "loss/excess", "margin/policy", "margin/reference", "margin/previous"} <= set(first)
    assert last["h/target"] == pytest.approx(0.5)
    assert {"kl/reference", "kl/previous", "win_rate/previous", "win_rate/first", "monitor/mean_length"} <= set(last)
    assert last["kl/reference"] == pytest.approx(last["kl/previous"], abs=1e-5)  # the first iterate is the reference
    assert last["win_rate/previous"] == last["win_rate/first"] and 0 <= last["win_rate/first"] <= 1
    assert called == [(1, made.policy)] and last["mine"] == 7
    lines = one_iteration(made)
    assert lines[-1]["kl/reference"] != lines[-1]["kl/previous"] and [t for t, _ in called] == [1, 2]
    assert made.counts["verifier_calls"] == oracle.queries
    assert made.counts["tokens_generated"] == 2 * 4 * 16 + 3 * 4
    assert made.counts["tokens_trained"] > 0


def test_the_monitor_leaves_the_weights_and_the_run_alone():
    runs = []
    for watched in (0, 4):
        made = game(iterations=2, monitor_prompts=watched)
        for _ in range(2):
            one_iteration(made)
        runs.append([p.clone() for p in made.policy.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_held_out_pairs_end_an_iteration_early_and_the_best_is_restored():
    """A learning rate so high that later passes are worse."""
    made = game(epochs=30, valid_share=0.5, patience=2, samples=32, optim=OptimConfig(lr=0.5), iterations=2)
    lines = []
    while made.iteration == 0:
        line, _ = made.train_step()
        lines.append(line)
        now = made._now or now  # noqa: F821
    losses = [line["valid/loss"] for line in lines if "valid/loss" in line]
    assert len(losses) < 30 and lines[-1]["valid/loss_best"] == min(lines[0]["valid/loss_before"], *losses)
    assert lines[-1]["valid/loss_best"] < losses[-1]
    made._now = now
    assert made._held_out(now) == pytest.approx(lines[-1]["valid/loss_best"], rel=1e-5)
    prompts = [{now.pairs[i].name for i in part} for part in (now.train, now.valid)]
    assert len(prompts[1]) == 2 and not prompts[0] & prompts[1]  # whole prompts are held out
    assert made.step == made.config.inner_steps  # the budget's place, not the steps made


# -- SPPO's and Nash-MD's win probabilities ----------------------------------------------------------------------------


def test_win_rates_by_hand():
    counts = PairCounts()
    (matrix,) = win_matrices(Counting(), [TASKS[0]], [["a", "b", "c", "a"]], counts)
    assert counts.queries == 5  # a against a is even, without a query
    assert matrix[0].tolist() == [0.5, 0.9, 0.3, 0.5] and matrix[1].tolist() == pytest.approx([0.1, 0.5, 0.8, 0.1])
    assert win_rates(matrix) == pytest.approx(matrix.mean(1))
    weights = np.array([1.0, 0.5, 0.25, 1.0])
    want = (0.5 * 0.9 + 0.25 * 0.3 + 1.0 * 0.5) / 1.75
    assert win_rates(matrix, weights)[0] == pytest.approx(want)
    matrix[0, 1] = matrix[1, 0] = math.nan
    assert win_rates(matrix)[0] == pytest.approx((0.5 + 0.3 + 0.5) / 3)
    matrix[0, 1:] = math.nan
    assert math.isnan(win_rates(matrix)[0])


def test_the_mixture_weighs_answers_by_reference_over_policy():
    tree = TokenTree([5], task="0")
    for i in range(3):
        tree.add(0, [LETTERS[i]], sampled=True, logprobs=[-1.0], stop=Stop.EOS)

    def fill(pairs):
        for pair in pairs:
            where = pair.tree.span(pair.chosen)
            pair.tree.column(PREVIOUS)[where] = math.log(0.2)
            pair.tree.column(REFERENCE)[where] = math.log([0.2, 0.4, 0.1][pair.chosen - 1])

    pairs, counts = with_wins(Counting(), [(TASKS[0], tree)], lambda ids: "abc"[LETTERS.index(ids[0])], "iid",
                              annotate=fill, mixture=0.5)  # fmt: skip
    (pair,) = pairs
    weight = [1, math.sqrt(2), math.sqrt(0.5)]
    assert pair.win_chosen == pytest.approx((weight[1] * 0.9 + weight[2] * 0.3) / (weight[1] + weight[2]))
    assert pair.win_rejected == pytest.approx((weight[0] * 0.1 + weight[2] * 0.8) / (weight[0] + weight[2]))
    assert pair.p == 0.9 and counts.dropped == {"sample/odd": 1} and counts.queries == 3


# -- stop and go on ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"valid_share": 0.5, "patience": 3}, {"loss": "nash_md", "epochs": 1}])
def test_killed_and_resumed_equals_unbroken(tmp_path, settings):
    settings = {"iterations": 2, "epochs": 2, "samples": 8, "monitor_prompts": 3, **settings}
    total = GameConfig(**{"prompts_per_iteration": 4, "batch_size": 8, **settings}).total_steps

    def job(name, steps, resume=False):
        made = game(**settings)
        with RunDir.create(tmp_path / name, {}, resume=resume) as run:
            fit(made, run, steps=steps, save_every=1)
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        lines = [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]
        return lines, [p.clone() for p in made.policy.model.parameters()], made.counts

    lines, weights, counts = job("unbroken", total)
    inner = total // 2
    for stop in (1, inner, inner + 1) if not settings.get("loss") else (inner + 1,):
        job(f"killed {stop}", stop)
        again, same, spent = job(f"killed {stop}", total, resume=True)
        assert again == lines and spent == counts
        assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_an_iteration_without_pairs():
    same = Counting(lambda *_: 0.5)
    with pytest.raises(DataError, match="iteration 1: nothing is left: 0 pairs from 4 prompts.*pairs without a winner"):
        game(oracle=same, pair_mode="tournament", samples=16).train_step()
    made = game(iterations=2)
    one_iteration(made)
    made.decode = lambda ids: "always the same"
    line, shown = made.train_step()
    assert line["pairs/made"] == 0 and line["pairs/dropped_share"] == 1 and line["pairs/dropped/pair_identical"] == 16
    assert shown == [] and made.iteration == 2 and made.step == made.config.total_steps


def test_failed_comparisons_are_missing_and_counted():
    def sometimes(task, a, b):
        if "a" in (a[:1], b[:1]):
            raise KeyError("a")
        return prefer(task, a, b)

    for loss in ("inpo", "sppo"):
        line, _ = game(oracle=Counting(sometimes), loss=loss, samples=32).train_step()
        name = "pairs/dropped/" + ("pair_not_judged" if loss == "inpo" else "sample_not_judged")
        assert line[name] > 0 and line["pairs/made"] > 0
    with pytest.raises(RewardError, match="all .* comparisons failed; the first: .*no judge"):

        def never(*_):
            raise ValueError("no judge")

        game(oracle=Counting(never), loss="sppo").train_step()
    with pytest.raises(RewardError, match="all .* comparisons failed"):
        game(oracle=Counting(lambda *_: 1.5)).train_step()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eta": 0.1, "tau": 0.2}, "tau=0.2 exceeds eta=0.1"),
        ({"pair_mode": "tournament", "samples": 6}, "samples=6: a tournament needs a power of two"),
        ({"samples": 1}, "samples=1: a pair needs at least 2"),
        ({"temperature": 0.0}, "temperature=0.0: equal answers make no pairs"),
        ({"loss": "sppo", "pair_mode": "soft"}, "pair_mode='soft': with loss=sppo give one of iid, max_min"),
        ({"loss": "nash_md", "epochs": 2}, "epochs=2: nash_md is REINFORCE"),
        ({"eta_schedule": "growing", "eta": 1.0, "tau": 0.1}, "eta_schedule=growing: eta is tau"),
        ({"eta_schedule": "growing"}, "give tau > 0 and no eta"),
        ({"loss": "dpo", "eta_schedule": "growing"}, "eta_schedule=growing: loss=dpo has no eta"),
        ({"patience": 3}, "patience=3: at least 1; it needs valid_share > 0"),
        ({"mixture": 0.2}, "mixture=0.2: a share in .0, 1., which only nash_md reads"),
        ({"loss": "dpo", "tau": 0.2}, "tau=0.2: loss=dpo does not read it"),
        ({"iterations": 0, "epochs": 0}, "iterations=0: give at least 1; epochs=0"),
    ],
)
def test_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        GameConfig(**settings)


def test_a_step_whose_comparisons_all_fail_can_be_made_again():
    def never(*_):
        raise ValueError("down")

    good, broken = game(), game(oracle=Counting(never))
    with pytest.raises(RewardError, match="down"):
        broken.train_step()
    assert broken.counts["tokens_generated"] == 0 and broken.step == 0
    broken.oracle = Counting()
    drop = {"time/rollout", "time/reward", "time/annotate", "time/step", "time/pack", "time/update"}
    lines = [{k: v for k, v in made.train_step()[0].items() if k not in drop} for made in (good, broken)]
    assert lines[0] == lines[1]


def test_only_the_number_of_iterations_may_change_on_resume():
    state = game(epochs=2).state_dict()
    game(epochs=2, iterations=9).load_state_dict(state)
    with pytest.raises(
        ConfigError, match="an iteration of this run has 4 steps, with these settings 6: only `iterations`"
    ):
        game(epochs=3).load_state_dict(state)


def test_other_refusals():
    with pytest.raises(ConfigError, match="prompts_per_iteration=9 exceeds the 4 prompts of the data"):
        game(prompts_per_iteration=9)
    with pytest.raises(DataError, match="no tasks"):
        GameTrainer(policy(), TorchEngine(policy()), [], lambda t: [1], Counting(), GameConfig())
    with pytest.raises(DataError, match="task 'x': its prompt has 16 tokens"):
        game([{"id": "x", "prompt": "?" * 16}], prompts_per_iteration=1)


def test_eta_grows():
    config = GameConfig(tau=0.1, eta_schedule="growing")
    assert [config.numbers(t).eta for t in (1, 2, 10)] == pytest.approx([0.15, 0.2, 0.6])
    assert config.numbers(3).tau == 0.1


def test_batch_arithmetic():
    config = GameConfig(iterations=3, prompts_per_iteration=10, samples=8, epochs=2, batch_size=16)
    assert config.pairs_per_prompt == 4 and config.inner_steps == 2 * 3 and config.total_steps == 18
    assert GameConfig(pair_mode="tournament", prompts_per_iteration=10, batch_size=16).inner_steps == 1
