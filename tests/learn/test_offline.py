"""Supervised fine-tuning: learns, counts tokens and epochs, packs without leaks, resumes exactly, refuses bad data."""

import json
import math

import pytest
import torch

from forethought.errors import ConfigError, DataError
from forethought.learn.learner import Learner
from forethought.learn.offline import SFTConfig, SFTTrainer, sft_objective
from forethought.learn.optim import OptimConfig
from forethought.learn.session import fit
from forethought.models.engine import Sampling
from forethought.models.policy import Policy
from forethought.models.torch_engine import TorchEngine
from forethought.rundir import RunDir
from forethought.tree.tree import Stop, TokenTree
from tinymodels import IntTokenizer, tiny

EOS = 1


def record(prompt, answer, task="") -> TokenTree:
    """One document; the answer's tokens and its end token are targets."""
    tree = TokenTree(prompt, task=task)
    node = tree.add(0, [*answer, EOS])
    tree.weight[tree.span(node)] = 1
    return tree


def documents(n=10) -> list[TokenTree]:
    """Answers of 1 to 4 tokens, so that sequence and token means differ."""
    return [record([20 + i, 6, 7], [40 + (3 * i + j) % 30 for j in range(1 + i % 4)], str(i)) for i in range(n)]


def trainer(trees=None, **config) -> SFTTrainer:
    config = {"batch_size": 4, "optim": OptimConfig(lr=1e-3), **config}
    return SFTTrainer(Policy(tiny("llama"), IntTokenizer()), trees or documents(), SFTConfig(**config))


def watched(made: SFTTrainer) -> list[list[str]]:
    """Fills with the task ids of every update that the trainer makes."""
    seen: list[list[str]] = []
    update = made.learner.update

    def spy(trees, *args, **kwargs):
        seen.append([t.task for t in trees])
        return update(trees, *args, **kwargs)

    made.learner.update = spy  # type: ignore[method-assign]
    return seen


def weights(made: SFTTrainer) -> dict[str, torch.Tensor]:
    return {n: m.clone() for n, m in made.learner.optimizer.master_state().items()}


def mean_loss(model, trees) -> float:
    """Mean over all targets, document by document, by the model's own forward."""
    total, count = 0.0, 0
    model.eval()
    with torch.no_grad():
        for tree in trees:
            ids = torch.tensor([tree.path_ids(tree.leaves()[0])])
            logp = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            targets = torch.from_numpy(tree.weight[1:] > 0)
            total, count = total - float(logp[targets].sum()), count + int(targets.sum())
    return total / count


# -- it learns --
def test_learns_a_mapping_and_when_to_stop():
    pairs = {(10 + a, 20 + b): [30 + a, 40 + b][: 1 + (a + b) % 2] for a in range(4) for b in range(4)}
    made = trainer([record(k, v) for k, v in pairs.items()], steps=60, batch_size=16, optim=OptimConfig(lr=5e-3))
    losses = [made.train_step()[0]["loss"] for _ in range(60)]
    assert losses[0] > 3 and losses[-1] < 0.02
    prompts = [TokenTree(list(k)) for k in pairs]
    made.policy.model.eval()
    nodes = TorchEngine(made.policy).extend([(t, 0) for t in prompts], 1, Sampling(max_tokens=6, temperature=0))
    for tree, (node,), answer in zip(prompts, nodes, pairs.values(), strict=True):
        assert tree.node_ids(node) == [*answer, EOS] and tree.stop[node] == Stop.EOS


def test_the_loss_is_the_mean_over_the_targets_of_each_batch():
    """Case H01: token by token in every batch, the short last one included."""
    made = trainer(epochs=1, micro_tokens=12)
    seen = watched(made)
    by_task = {t.task: t for t in documents()}
    for _ in range(made.total):
        model = tiny("llama")
        model.load_state_dict(made.policy.model.state_dict())
        metrics, _ = made.train_step()
        batch = [by_task[i] for i in seen[-1]]
        assert metrics["loss"] == pytest.approx(mean_loss(model, batch), rel=1e-5)
        assert metrics["tokens/trained"] == sum(int(t.weight.sum()) for t in batch)
    assert [len(b) for b in seen] == [4, 4, 2]
    assert made.counts["tokens_trained"] == sum(int(t.weight.sum()) for t in documents()) == 33


def test_sequence_mean_is_another_loss():
    made = trainer(epochs=1, reduction="sequence-mean", batch_size=10)
    want = sum(mean_loss(made.policy.model, [t]) for t in documents()) / 10
    assert made.train_step()[0]["loss"] == pytest.approx(want, rel=1e-5)
    assert want != pytest.approx(mean_loss(tiny("llama"), documents()), rel=1e-3)


@pytest.mark.parametrize("layout", ["tree", "linear"])
def test_packed_equals_unpacked(layout):
    """Case H11: documents of one batch cannot see each other; loss, gradient norm and step are those of one by one."""
    found = []
    for micro in (4096, 9):
        policy = Policy(tiny("llama"), IntTokenizer(), layout=layout)
        made = Learner(policy, OptimConfig(lr=1e-3, eps=1e-4), total_steps=1, micro_tokens=micro)
        assert len(made.pack(documents())) == (1 if micro > 9 else 10)
        metrics = made.update(documents(), sft_objective)
        found.append((metrics["loss"], metrics["grad_norm"], made.optimizer.master_state()))
    (loss, norm, packed), (one_by_one, same, alone) = found
    assert loss == pytest.approx(one_by_one, rel=1e-6) and norm == pytest.approx(same, rel=1e-5)
    assert loss == pytest.approx(mean_loss(tiny("llama"), documents()), rel=1e-5)
    for name, master in packed.items():
        torch.testing.assert_close(master, alone[name], atol=1e-6, rtol=0)


# -- epochs --
def test_epochs_end():
    """Case H33: batches of 4, 4, 2 an epoch, every record once an epoch, then the end."""
    made = trainer(epochs=2)
    seen = watched(made)
    assert made.total == 6
    epochs = [made.train_step()[0]["epoch"] for _ in range(made.total)]
    assert [len(b) for b in seen] == [4, 4, 2, 4, 4, 2]
    for half in (seen[:3], seen[3:]):
        assert sorted(int(i) for b in half for i in b) == list(range(10))
    assert seen[:3] != seen[3:]  # shuffled anew
    assert epochs == [0, 0, 1, 1, 1, 2]  # epochs that are complete
    before = weights(made)
    with pytest.raises(StopIteration):
        made.train_step()
    assert made.step == 6 and all(torch.equal(m, before[n]) for n, m in weights(made).items())


def test_steps_run_over_epochs_and_a_large_batch_is_the_whole_data():
    made = trainer(steps=7, batch_size=16)
    seen = watched(made)
    for _ in range(7):
        made.train_step()
    assert made.total == 7 and all(sorted(map(int, b)) == list(range(10)) for b in seen)
    assert trainer(epochs=3, batch_size=16).total == 3


def test_a_run_ends_with_its_epochs(tmp_path):
    made = trainer(epochs=2)
    with RunDir.create(tmp_path / "run", made.config) as run:
        fit(made, run, steps=made.total)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 6] and rows[-1]["epoch"] == 2


# -- resume --
def test_resume_in_the_middle_of_an_epoch(tmp_path):
    """Case H13: 10 records in batches of 2, 2 epochs, saved after step 7; steps 8 to 10 use the records of the unbroken
    run in its order, each record occurs twice, and the final weights are the same bits."""
    settings = dict(epochs=2, batch_size=2, optim=OptimConfig(lr=0.01, schedule="linear", weight_decay=0.1))
    whole = trainer(**settings)
    wanted = watched(whole)
    with RunDir.create(tmp_path / "whole", whole.config) as run:
        fit(whole, run, steps=10)
    first = trainer(**settings)
    seen = watched(first)
    with RunDir.create(tmp_path / "broken", first.config) as run:
        fit(first, run, steps=7)
    second = trainer(**settings)
    with torch.no_grad():  # a new process holds other weights until it has loaded
        for p in second.policy.model.parameters():
            p.mul_(0.5)
    torch.manual_seed(99)
    seen_after = watched(second)
    with RunDir.create(tmp_path / "broken", second.config, resume=True) as run:
        fit(second, run, steps=10)
    assert seen == wanted[:7] and seen_after == wanted[7:] and len(seen_after) == 3
    every = [i for batch in seen + seen_after for i in batch]
    assert all(every.count(str(i)) == 2 for i in range(10))
    assert second.step == 10 and second.counts == whole.counts
    final = weights(second)
    assert all(torch.equal(m, final[n]) for n, m in weights(whole).items())
    lines = [
        [
            {k: v for k, v in json.loads(line).items() if not k.startswith("time/")}
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        for name in ("whole", "broken")
    ]
    assert lines[0] == lines[1] and [r["step"] for r in lines[0]] == list(range(1, 11))
    files = [tmp_path / name / "checkpoints" / "step_00000010" / "model.safetensors" for name in ("whole", "broken")]
    assert files[0].read_bytes() == files[1].read_bytes()


# -- bad data --
def test_a_batch_without_a_target_is_skipped_and_counted():
    trees = documents(4)
    for tree in trees[1:3]:
        tree.weight[:] = 0
    made = trainer(trees, epochs=2, batch_size=1)
    for _ in range(made.total):
        before = weights(made)
        step = made.learner.optimizer.step_index
        metrics, _ = made.train_step()
        if "batches_without_target" in metrics:
            assert metrics["batches_without_target"] == 1 and "loss" not in metrics
            assert all(torch.equal(m, before[n]) for n, m in weights(made).items())
            assert made.learner.optimizer.step_index == step
        else:
            assert math.isfinite(metrics["loss"]) and made.learner.optimizer.step_index == step + 1
    assert made.step == 8 and made.learner.optimizer.step_index == 4
    assert made.counts["tokens_trained"] == 2 * sum(int(t.weight.sum()) for t in trees)


def test_bad_data_is_refused_before_compute():
    policy = Policy(tiny("llama"), IntTokenizer())
    with pytest.raises(DataError, match="no records: the data is empty"):
        SFTTrainer(policy, [], SFTConfig())
    empty = documents(3)
    for tree in empty:
        tree.weight[:] = 0
    with pytest.raises(DataError, match="no record has a target"):
        SFTTrainer(policy, empty, SFTConfig())
    with pytest.raises(DataError, match="record 1 has 262 tokens; the context is 256"):
        SFTTrainer(policy, [record([5], [6]), record([5] * 60, [6] * 201)], SFTConfig())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"epochs": 0}, "epochs=0: give at least 1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"micro_tokens": 0}, "micro_tokens=0"),
        ({"steps": -1}, r"steps=-1: give 0 \(train for `epochs`\)"),
        ({"epochs": 0, "steps": -1}, "epochs=0.*; steps=-1"),
    ],
)
def test_config_refuses(kwargs, message):
    with pytest.raises(ConfigError, match=f"sft: {message}"):
        SFTConfig(**kwargs)
