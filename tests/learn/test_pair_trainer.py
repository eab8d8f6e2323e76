"""Preference pairs on trees: exact sums, one step whatever the packing, cached ties, resume, and refusals."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from forethought.errors import ConfigError, DataError
from forethought.learn.learner import Learner
from forethought.learn.optim import OptimConfig
from forethought.learn.pairs import (
    PREVIOUS,
    REFERENCE,
    Answers,
    PairConfig,
    PairTrainer,
    PreferencePair,
    annotate,
    left_out,
    measure_pairs,
    micro_batches,
    update_pairs,
    usable_pairs,
)
from forethought.learn.session import fit
from forethought.models.policy import Policy
from forethought.rundir import RunDir
from forethought.tree.tree import TokenTree
from tinymodels import IntTokenizer, tiny

EOS = 1


def pair(prompt, chosen, rejected, name="", **settings) -> PreferencePair:
    tree = TokenTree(prompt, task=name)
    nodes = [tree.add(0, [*answer, EOS]) for answer in (chosen, rejected)]
    tree.weight[len(prompt) :] = 1
    return PreferencePair(tree, *nodes, task={"id": name}, **settings)


def pairs(n=6) -> list[PreferencePair]:
    """Answers of 1 to 4 tokens, p from .5 to 1."""
    return [
        pair(
            [20 + i, 6, 7],
            [40 + (3 * i + j) % 30 for j in range(1 + i % 3)],
            [41 + (5 * i + j) % 30 for j in range(1 + (i + 1) % 4)],
            str(i),
            p=0.5 + i / 10,
            win_chosen=0.5 + i / 20,
            win_rejected=0.4 - i / 20,
        )
        for i in range(n)
    ]


def shared_tree() -> list[PreferencePair]:
    """Three pairs over four samples of one prompt; sample 2 stands in two of them."""
    tree = TokenTree([20, 6, 7, 8], task="shared")
    nodes = [tree.add(0, [40 + 5 * i, 41 + i, 50][: 1 + i % 3] + [EOS]) for i in range(4)]
    tree.weight[4:] = 1
    return [PreferencePair(tree, nodes[a], nodes[b], p=0.8, task={"id": "shared"}) for a, b in ((0, 1), (2, 3), (2, 0))]


def dialogue() -> PreferencePair:
    """Two turns; the first answer is shared and a target of both sides."""
    tree = TokenTree([20, 6, 7], task="two turns")
    first = tree.add(0, [44, EOS])
    user = tree.add(first, [9, 9])
    nodes = [tree.add(user, [*answer, EOS]) for answer in ([45, 46], [47])]
    for node in (first, *nodes):
        tree.weight[tree.span(node)] = 1
    return PreferencePair(tree, *nodes, task={"id": "two turns"})


def policy(layout=None, seed=0) -> Policy:
    return Policy(tiny("llama", seed), IntTokenizer(), layout=layout)


def whole_row(model, tree, node) -> float:
    """Log-prob of the trained tokens on a path, by the model's own forward."""
    path = tree.path_tokens(node)
    ids = torch.tensor([tree.ids[path].tolist()])
    with torch.no_grad():
        logp = model(input_ids=ids).logits[0, :-1].double().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return float(logp[torch.from_numpy(tree.weight[path][1:] > 0)].sum())


def trainer(data=None, layout=None, reference=None, previous=None, **config) -> PairTrainer:
    config = {"batch_size": 3, "optim": OptimConfig(lr=1e-3), **config}
    return PairTrainer(policy(layout), data or pairs(), PairConfig(**config), reference=reference, previous=previous)


def masters(made: PairTrainer) -> dict[str, torch.Tensor]:
    return {n: m.clone() for n, m in made.learner.optimizer.master_state().items()}


# -- sums --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["tree", "linear"])
@pytest.mark.parametrize("budget", [None, 12, 4])
def test_sums_over_answers_are_those_of_whole_rows(layout, budget):
    """Acceptance check 15, too: in the linear layout rows of different lengths are padded."""
    data = [*pairs(3), *shared_tree(), dialogue()]
    model = policy(layout)
    for batch, mine in micro_batches(data, layout, budget):
        chosen, rejected = Answers(batch, mine).sums(model.logprobs(batch)[0].detach())
        for i, one in enumerate(mine):
            assert chosen[i].item() == pytest.approx(whole_row(model.core, one.tree, one.chosen), abs=1e-4)
            assert rejected[i].item() == pytest.approx(whole_row(model.core, one.tree, one.rejected), abs=1e-4)


def test_micro_batches_keep_pairs_whole_and_share_prompts():
    data = [*shared_tree(), *pairs(2)]
    for layout, sizes in (("tree", [4 + 2 + 3 + 4 + 2]), ("linear", [6 + 7 + 8 + 6])):
        ((batch, mine),) = micro_batches(shared_tree(), layout, None)
        assert batch.n_tokens == sizes[0] and len(mine) == 3
    # Pairs of one tree that do not fit together stand in several batches; each batch holds both answers of its pairs.
    found = micro_batches(data, "tree", 12)
    assert [len(mine) for _, mine in found] == [1, 2, 1, 1]  # the second two share a sample
    for batch, mine in found:
        assert batch.n_targets == len({(one.name, t) for one in mine for side in one.answers() for t in side.tolist()})
    assert [one.name for _, mine in micro_batches(data[::-1], "tree", None) for one in mine] == [
        "1", "0", "shared", "shared", "shared",
    ]  # fmt: skip


LOSSES = [
    {"loss": "dpo", "beta": 0.5},
    {"loss": "dpo", "form": "robust", "label_smoothing": 0.1},
    {"loss": "dpo", "base": "none"},
    {"loss": "dpo", "base": "previous", "labels": "soft"},
    {"loss": "ipo", "beta": 0.5},
    {"loss": "inpo", "eta": 1.0, "tau": 0.25},
    {"loss": "inpo", "eta": 1.0, "tau": 0.25, "labels": "soft"},
    {"loss": "sppo", "beta": 0.5},
    {"loss": "nash_md", "beta": 0.5},
]


@pytest.mark.parametrize("settings", LOSSES, ids=lambda s: "-".join(map(str, s.values())))
def test_one_step_whatever_the_layout_and_the_micro_batches(settings):
    """Tree and linear rows, one micro-batch or one a pair: the same loss, metrics, gradient and weights."""
    found = []
    data = pairs()
    annotate(policy(seed=1), data, REFERENCE)
    annotate(policy(seed=2), data, PREVIOUS)
    config = PairConfig(**settings)
    for layout, micro in (("tree", None), ("tree", 8), ("linear", None), ("linear", 16)):
        learner = Learner(policy(layout), OptimConfig(lr=1e-3, eps=1e-4), total_steps=1, micro_tokens=micro)
        assert len(micro_batches(data, layout, micro)) == (1 if micro is None else 6)
        metrics = update_pairs(learner, data, config, config.numbers(), soft=config.labels == "soft")
        found.append((metrics, learner.optimizer.master_state()))
    for metrics, weights in found[1:]:
        for name, value in found[0][0].items():
            if not name.startswith(("time/", "tokens/")):
                assert metrics[name] == pytest.approx(value, rel=2e-4, abs=1e-5), name
        for name, master in found[0][1].items():
            torch.testing.assert_close(master, weights[name], atol=2e-6, rtol=0)
    assert found[0][0]["grad_norm"] > 1e-3


def test_nash_md_counts_every_answer_half():
    """By hand from the sums: mean over answers of beta * sum(ratio * logp) - (win - 1/2) * sum(logp)."""
    data, model = pairs(3), policy()
    annotate(policy(seed=1), data, REFERENCE)
    annotate(model, data, "own")
    terms = []
    for one in data:
        for tokens, win in zip(one.answers(), (one.win_chosen, one.win_rejected), strict=True):
            own, ref = (one.tree.column(c)[tokens].astype(float) for c in ("own", REFERENCE))
            terms.append(0.5 * ((own - ref) * own).sum() - (win - 0.5) * own.sum())
    config = PairConfig(loss="nash_md", beta=0.5)
    learner = Learner(model, OptimConfig(), total_steps=1)
    assert update_pairs(learner, data, config, config.numbers())["loss"] == pytest.approx(np.mean(terms), rel=1e-4)


def test_measures_of_single_pairs_are_those_of_the_step():
    data, model = pairs(), policy()
    annotate(policy(seed=1), data, REFERENCE)
    config = PairConfig(loss="ipo", beta=0.5)
    found = measure_pairs(model, data, config, micro_tokens=20)
    metrics = update_pairs(Learner(model, OptimConfig(), total_steps=1), data, config, config.numbers())
    assert found["loss"].mean() == pytest.approx(metrics["loss"], rel=1e-5)
    assert found["margin"].mean() == pytest.approx(metrics["h/mean"], rel=1e-5)
    assert found["policy"].mean() == pytest.approx(metrics["margin/policy"], rel=1e-5)
    assert (found["margin"] > 0).mean() == pytest.approx(metrics["rewards/accuracies"])
    excess = found["loss"] - [one.p * (1 - one.p) / 0.25 for one in data]
    assert excess.mean() == pytest.approx(metrics["loss/excess"], rel=1e-5)
    assert metrics["h/target"] == pytest.approx(1.0)


# -- the trainer -------------------------------------------------------------------------------------------------------


def test_learns_the_preferences():
    made = trainer(loss="dpo", beta=0.5, epochs=30, optim=OptimConfig(lr=3e-3))
    first = made.train_step()[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)  # the reference is the policy itself
    assert first["h/mean"] == pytest.approx(0, abs=1e-5)
    for _ in range(made.total - 1):
        last, _ = made.train_step()
    assert made.total == 60 and last["loss"] < 0.1 and last["rewards/accuracies"] == 1
    with pytest.raises(StopIteration):
        made.train_step()


def test_inpo_reaches_the_minimum_of_its_soft_loss():
    data = pairs()
    made = trainer(data, loss="inpo", eta=1.0, tau=0.2, labels="soft", steps=150, batch_size=6,
                   optim=OptimConfig(lr=2e-3))  # fmt: skip
    for _ in range(150):
        metrics, _ = made.train_step()
    assert metrics["loss/excess"] < 1e-3
    margins = measure_pairs(made.policy, data, made.config, soft=True)["margin"]
    assert margins == pytest.approx([one.p - 0.5 for one in data], abs=0.03) and margins[-1] > 0.45


def test_ties_are_read_once_and_let_go(monkeypatch):
    """Two other models; their log-probs are those before the first step, whatever happens to them later."""
    calls = []
    real = annotate

    def spy(model, *args, **kwargs):
        calls.append(model)
        return real(model, *args, **kwargs)

    monkeypatch.setattr("forethought.learn.pairs.annotate", spy)
    reference, previous = policy(seed=1), policy(seed=2)
    data = pairs()
    made = trainer(data, loss="inpo", eta=1.0, tau=0.2, reference=reference, previous=previous, epochs=2)
    made.train_step()
    assert calls == [reference, previous] and all(v is None for v in made._ties.values())
    kept = [one.tree.column(PREVIOUS).copy() for one in data]
    with torch.no_grad():
        for p in previous.model.parameters():
            p.zero_()
    for _ in range(made.total - 1):
        made.train_step()
    assert len(calls) == 2
    for one, column in zip(data, kept, strict=True):
        assert np.array_equal(one.tree.column(PREVIOUS), column, equal_nan=True)
        tokens = one.answers()[0]
        want = whole_row(tiny("llama", 1), one.tree, one.chosen)
        assert one.tree.column(REFERENCE)[tokens].sum() == pytest.approx(want, abs=1e-4)


def test_without_other_models_the_policy_at_the_start_is_both():
    made = trainer(loss="inpo", eta=1.0, tau=0.2)
    metrics, _ = made.train_step()
    assert metrics["moved/max"] < 1e-5 and metrics["margin/reference"] == metrics["margin/previous"]
    assert metrics["loss"] == pytest.approx(0.25, abs=1e-5)
    assert metrics["h/target"] == pytest.approx(0.5)


def test_columns_that_stand_there_already():
    data = pairs()
    annotate(policy(seed=1), data, REFERENCE)
    by_column = trainer(data, loss="dpo", reference="columns")
    by_model = trainer(pairs(), loss="dpo", reference=policy(seed=1))
    assert by_column.train_step()[0]["loss"] == by_model.train_step()[0]["loss"] != pytest.approx(math.log(2), abs=1e-3)


def test_compute_in_bfloat16_scores_ties_in_it():
    reference = policy(seed=1)
    config = PairConfig(loss="dpo", batch_size=6, optim=OptimConfig(lr=1e-3))
    made = PairTrainer(policy(seed=1), pairs(), config, reference=reference, compute=torch.bfloat16)
    metrics, _ = made.train_step()
    assert reference.dtype == torch.bfloat16 == made.policy.dtype
    assert metrics["loss"] == pytest.approx(math.log(2), abs=0.01)  # float32 log-probs would be off by more
    assert all(m.dtype == torch.float32 for m in masters(made).values())


def test_lora_has_the_bare_model_as_reference():
    peft = pytest.importorskip("peft")

    def adapted():
        torch.manual_seed(0)
        lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.5)
        return Policy(peft.get_peft_model(tiny("llama"), lora), IntTokenizer())

    data = pairs()
    config = PairConfig(loss="dpo", beta=0.5, epochs=20, batch_size=6, optim=OptimConfig(lr=2e-2))
    made = PairTrainer(adapted(), data, config)
    base = {n: p.clone() for n, p in made.policy.model.named_parameters() if "lora" not in n}
    first, _ = made.train_step()
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)
    want = whole_row(tiny("llama"), data[2].tree, data[2].chosen)
    assert data[2].tree.column(REFERENCE)[data[2].answers()[0]].sum() == pytest.approx(want, abs=1e-4)
    for _ in range(made.total - 1):
        last, _ = made.train_step()
    assert last["loss"] < 0.3
    assert all(torch.equal(p, base[n]) for n, p in made.policy.model.named_parameters() if "lora" not in n)
    # By the adapter switched off: the same numbers as by the policy before its first step.
    again = PairTrainer(adapted(), pairs(), config, reference=adapted().frozen_copy())
    assert again.train_step()[0]["loss"] == pytest.approx(first["loss"], abs=1e-6)


@pytest.mark.parametrize("stop", [1, 3])
def test_killed_and_resumed_equals_unbroken(tmp_path, stop):
    def job(name, steps, resume=False):
        made = trainer(loss="inpo", eta=1.0, tau=0.2, epochs=3, batch_size=4, reference=policy(seed=1))
        with RunDir.create(tmp_path / name, {}, resume=resume) as run:
            fit(made, run, steps=steps, save_every=1)
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines], masters(made)

    lines, weights = job("unbroken", 6)
    job("killed", stop)
    resumed, same = job("killed", 6, resume=True)
    assert resumed == lines and len(lines) == 6
    assert all(torch.equal(m, same[n]) for n, m in weights.items())


# -- bad input ---------------------------------------------------------------------------------------------------------


def broken() -> dict[str, PreferencePair]:
    two_prompts = TokenTree([5, 6])
    nodes = [two_prompts.add(two_prompts.add(0, [7 + i]), [40 + i, EOS]) for i in range(2)]
    for node in nodes:
        two_prompts.weight[two_prompts.span(node)] = 1
    empty = pair([5, 6], [40], [41], "c")
    empty.tree.weight[empty.tree.span(empty.rejected)] = 0
    return {
        "identical": pair([5, 6], [40, 41], [40, 41], "a"),
        "prompts differ": PreferencePair(two_prompts, *nodes, task={"id": "b"}),
        "empty": empty,
        "too long": pair([5, 6], [40] * 300, [41], "d"),
    }


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("identical", r"pair 1 \('a'\): both answers are equal; usable_pairs\(pairs\) leaves such pairs out"),
        ("prompts differ", r"pair 1 \('b'\): the answers follow different prompts"),
        ("empty", r"pair 1 \('c'\): an answer is empty"),
        ("too long", r"pair 1 \('d'\): a path is too long"),
    ],
)
def test_a_broken_pair_is_named(kind, message):
    with pytest.raises(DataError, match=message):
        trainer([pairs(1)[0], broken()[kind]])


def test_broken_pairs_are_left_out_and_counted():
    good = pairs(2)
    kept, dropped = usable_pairs([good[0], *broken().values(), *broken().values(), good[1]], context=256)
    assert kept == good and dropped == dict.fromkeys(broken(), 2)
    assert "2 pairs (both answers are equal)" in left_out(dropped) and "2 pairs (an answer is empty)" in left_out(
        dropped
    )
    with pytest.raises(DataError, match="pair '0': rejected=9 is no node of its tree"):
        usable_pairs([PreferencePair(good[0].tree, 1, 9, task={"id": "0"})])
    with pytest.raises(DataError, match=r"pair '0': p=1.2: a probability lies in \[0, 1\]"):
        usable_pairs([PreferencePair(good[0].tree, 1, 2, p=1.2, task={"id": "0"})])


def test_missing_and_undefined_columns():
    """Acceptance check 13."""
    with pytest.raises(DataError, match="pair '0': its tree has no column 'ref_logprob'; fill it with annotate"):
        trainer(loss="dpo", reference="columns").train_step()
    data = pairs()
    annotate(policy(), data, REFERENCE)
    data[1].tree.column(REFERENCE)[data[1].answers()[1][0]] = math.nan
    with pytest.raises(
        DataError, match="pair '1': column 'ref_logprob' is nan at 1 of the 4 tokens of its rejected answer"
    ):
        trainer(data, loss="dpo", reference="columns").train_step()
    made = trainer()
    with torch.no_grad():
        made.policy.model.get_input_embeddings().weight[6] = math.nan
    with pytest.raises(DataError, match="column 'ref_logprob' is nan"):
        made.train_step()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "inpo", "eta": 0.1, "tau": 0.2}, "tau=0.2 exceeds eta=0.1"),
        ({"loss": "inpo", "tau": -1.0}, "tau=-1.0: the tie to the reference is 0 or more"),
        ({"loss": "inpo", "eta": 0.0}, "eta=0.0: give a positive number"),
        ({"loss": "inpo", "beta": 0.1}, r"beta=0.1: loss=inpo does not read it \(but eta, tau\)"),
        ({"loss": "ipo", "label_smoothing": 0.1}, "label_smoothing=0.1: loss=ipo does not read it"),
        ({"loss": "dpo", "eta": 0.1}, "eta=0.1: loss=dpo does not read it"),
        ({"loss": "dpo", "label_smoothing": 0.7}, "label_smoothing=0.7: the share"),
        ({"loss": "dp0"}, "loss='dp0': give one of dpo, ipo, inpo, sppo, nash_md"),
        ({"loss": "sppo", "labels": "soft"}, "labels=soft: loss=sppo reads win probabilities"),
        ({"batch_size": 0, "epochs": 0}, "epochs=0: give at least 1; batch_size=0: give at least 1"),
    ],
)
def test_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        PairConfig(**settings)


def test_other_refusals():
    with pytest.raises(DataError, match="no preference pairs: the data is empty"):
        PairTrainer(policy(), [], PairConfig())
    with pytest.raises(ConfigError, match="previous: the loss 'dpo' does not read it as it is set; leave it out"):
        trainer(previous=policy())
    with pytest.raises(DataError, match="pair '0': sppo reads the win probability of each answer"):
        trainer([pair([5, 6], [40], [41], "0")], loss="sppo").train_step()


def test_default_numbers_are_the_published_ones():
    assert PairConfig(loss="inpo").numbers()[1:] == (0.005, pytest.approx(0.005 / 3))
    assert PairConfig(loss="sppo").numbers().beta == 1e-3 and PairConfig(loss="nash_md").numbers().beta == 0.1
    assert PairConfig(loss="inpo", eta=0.3).numbers().tau == pytest.approx(0.1)
