"""TRL as oracle: same batch, same advantages, same clip -> same loss, same gradients, to 1e-4.

Their side is `GRPOTrainer._compute_loss` and `SFTTrainer.compute_loss` themselves on padded rows; ours is a token tree
with the prompt standing once, packed, through the fused head and the pure losses. Needs trl (extra `trl`).
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("trl", reason="trl is not installed (pip install 'forethought[trl]')")
pytestmark = pytest.mark.filterwarnings("ignore")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer  # noqa: E402

from forethought.learn.losses import (  # noqa: E402
    entropy_bonus,
    kl_loss,
    policy_loss,
    reduction_coefficients,
    sft_loss,
)
from forethought.learn.pair_losses import dpo_loss, ipo_loss  # noqa: E402
from forethought.learn.pairs import REFERENCE, Answers, PreferencePair, annotate, micro_batches  # noqa: E402
from forethought.models.policy import Policy  # noqa: E402
from forethought.tree import credit  # noqa: E402
from forethought.tree.pack import Batch, pack  # noqa: E402
from forethought.tree.tree import TokenTree  # noqa: E402

PAD, EOS, VOCAB = 60, 61, 63
TEMPERATURE, LONGEST = 0.7, 6
# Two prompts, four completions each, all of different lengths.
PROMPTS = [[5, 9, 2, 31], [7, 1]]
COMPLETIONS = [
    [[11, 4, EOS], [11, 4, 8, 8, 3, 20], [40, EOS], [2, 2, 2, 2, EOS]],
    [[EOS], [13, 14, 15, EOS], [9, 9, EOS], [33, 12, 45, 6, 7, EOS]],
]
REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.5, 0.0, 1.0]]


@pytest.fixture(scope="module")
def tokenizer():
    words = {f"w{i}": i for i in range(60)} | {"<pad>": PAD, "<eos>": EOS, "<unk>": 62}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(4)  # far from uniform, so that differences show
    return model


SETTINGS = {"use_cpu": True, "bf16": False, "report_to": [], "gradient_checkpointing": False}


@pytest.fixture(scope="module")
def grpo(tokenizer, tmp_path_factory):
    args = GRPOConfig(
        str(tmp_path_factory.mktemp("grpo")),
        num_generations=4,
        per_device_train_batch_size=8,
        temperature=TEMPERATURE,
        max_completion_length=LONGEST,
        **SETTINGS,
    )
    data = Dataset.from_dict({"prompt": ["w1 w2"] * 8})
    return GRPOTrainer(
        llama(), lambda completions, **_: [0.0] * len(completions), args, data, processing_class=tokenizer
    )


@pytest.fixture(scope="module")
def columns():
    """Old and reference log-probs: away from the policy's, so that every clip is met."""
    model = Policy(llama(), _Ids())
    trees, _ = grown()
    (batch,) = model_batches(trees)
    with torch.no_grad():
        logp, _ = model.logprobs(batch, temperature=TEMPERATURE)
    make = torch.Generator().manual_seed(3)
    old = logp + 0.25 * torch.randn(len(logp), generator=make)
    ref = logp + 0.5 * torch.randn(len(logp), generator=make)
    return old, ref


class _Ids:
    eos_token_id, pad_token_id = EOS, PAD


def grown() -> tuple[list[TokenTree], list[float]]:
    """One tree a prompt, credited; and the advantages in the order of TRL's rows."""
    trees, groups = [], []
    for i, (prompt, completions, rewards) in enumerate(zip(PROMPTS, COMPLETIONS, REWARDS, strict=True)):
        tree = TokenTree(prompt, task=str(i))
        leaves = [
            tree.add(0, ids, sampled=True, logprobs=[0.0] * len(ids), reward=r)
            for ids, r in zip(completions, rewards, strict=True)
        ]
        trees.append(tree)
        groups.append([(tree, leaf) for leaf in leaves])
    return trees, [float(a) for part in credit.assign_groups(groups) for a in part]


def model_batches(trees, max_tokens=None) -> list[Batch]:
    return pack(trees, max_tokens=max_tokens, columns=["old_logprob", "ref_logprob"])


def store(trees, batch: Batch, name: str, values: torch.Tensor) -> None:
    for index, tree in enumerate(trees):
        mine = (batch.tree == index).numpy()
        tree.column(name)[batch.token.numpy()[mine]] = values.numpy()[mine]


def rows(trees, advantages, old, ref):
    """TRL's inputs: prompts padded on the left, completions on the right."""
    (batch,) = model_batches(trees)
    place = {(int(t), int(k)): i for i, (t, k) in enumerate(zip(batch.tree, batch.token, strict=True))}
    wide, long = max(map(len, PROMPTS)), max(len(c) for part in COMPLETIONS for c in part)
    out = {n: [] for n in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "old", "ref")}
    for index, tree in enumerate(trees):
        for leaf in tree.leaves():
            prompt, ids = tree.node_ids(0), tree.node_ids(leaf)
            left, right = wide - len(prompt), long - len(ids)
            out["prompt_ids"].append([PAD] * left + prompt)
            out["prompt_mask"].append([0] * left + [1] * len(prompt))
            out["completion_ids"].append(ids + [PAD] * right)
            out["completion_mask"].append([1] * len(ids) + [0] * right)
            at = [place[index, k] for k in range(tree.span(leaf).start, tree.span(leaf).stop)]
            for name, values in (("old", old), ("ref", ref)):
                out[name].append(values[at].tolist() + [0.0] * right)
    data = {k: torch.tensor(v) for k, v in out.items()}
    data["old_per_token_logps"], data["ref_per_token_logps"] = data.pop("old"), data.pop("ref")
    data["advantages"] = torch.tensor(advantages)
    data["num_items_in_batch"] = data["completion_mask"].sum()
    return data


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(ours: tuple[float, dict], theirs: tuple[float, dict]):
    assert ours[0] == pytest.approx(theirs[0], abs=1e-5, rel=1e-4)
    norms = [float(torch.stack([g.norm() for g in grads.values()]).norm()) for _, grads in (ours, theirs)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert norms[1] > 1e-3  # there is something to compare
    for name, gradient in theirs[1].items():
        torch.testing.assert_close(ours[1][name], gradient, rtol=1e-3, atol=1e-5)


def theirs_grpo(trainer, data, *, loss_type, beta, low, high, level="token", entropy=0.0, ratio_kl=False, micro=1):
    trainer.loss_type, trainer.beta, trainer.importance_sampling_level = loss_type, beta, level
    trainer.epsilon_low, trainer.epsilon_high = low, high
    trainer.entropy_coef, trainer._entropy_bonus_enabled = entropy, entropy != 0
    trainer.args.use_bias_correction_kl = ratio_kl
    trainer.current_gradient_accumulation_steps = micro
    trainer.args.steps_per_generation = micro
    model = trainer.model
    model.train()
    model.zero_grad()
    total = 0.0
    for part in range(micro):
        cut = slice(part * 8 // micro, (part + 1) * 8 // micro)
        mine = {k: v if v.ndim == 0 else v[cut] for k, v in data.items()}
        loss = trainer._compute_loss(model, mine)
        loss.backward()
        total += float(loss.detach())
    return total, gradients(model)


def ours_grpo(trees, *, reduction, beta, low, high, level="token", entropy=0.0, ratio_kl=False, max_tokens=None):
    model = llama()
    policy = Policy(model, _Ids())
    assert policy.layout == "tree"
    batches = model_batches(trees, max_tokens)
    weight, sequence = torch.cat([b.weight for b in batches]), torch.cat([b.sequence for b in batches])
    sizes = [b.n_targets for b in batches]
    coefs = reduction_coefficients(weight, sequence, reduction, max_length=LONGEST).split(sizes)
    means = reduction_coefficients(weight, sequence, "token-mean").split(sizes)
    total = 0.0
    for batch, coef, mean in zip(batches, coefs, means, strict=True):
        logp, spread = policy.logprobs(batch, temperature=TEMPERATURE, entropy=True)
        ids = batch.sequence if level == "sequence" else None
        loss = policy_loss(
            logp,
            batch.columns["old_logprob"],
            batch.advantage,
            coef,
            clip_low=low,
            clip_high=high,
            level=level,
            sequence_ids=ids,
        ).loss
        old = batch.columns["old_logprob"] if ratio_kl else None
        loss = loss + beta * kl_loss(logp, batch.columns["ref_logprob"], coef, old_logp=old).loss
        loss = loss + entropy * entropy_bonus(spread, mean).loss
        loss.backward()
        total += float(loss.detach())
    return total, gradients(model)


def prepared(columns):
    trees, advantages = grown()
    (batch,) = model_batches(trees)
    store(trees, batch, "old_logprob", columns[0])
    store(trees, batch, "ref_logprob", columns[1])
    return trees, rows(trees, advantages, *columns)


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize(
    ("loss_type", "reduction"),
    [("bnpo", "token-mean"), ("grpo", "sequence-mean"), ("dr_grpo", "dr-grpo"), ("dapo", "dapo")],
)
def test_grpo_loss_and_gradients(grpo, columns, loss_type, reduction, beta):
    trees, data = prepared(columns)
    theirs = theirs_grpo(grpo, data, loss_type=loss_type, beta=beta, low=0.2, high=0.28)
    clipped = grpo._metrics["train"]["clip_ratio/high_mean"][-1], grpo._metrics["train"]["clip_ratio/low_mean"][-1]
    assert min(clipped) > 0  # both clips are at work
    assert_same(ours_grpo(trees, reduction=reduction, beta=beta, low=0.2, high=0.28), theirs)


def test_ratio_weighted_kl(grpo, columns):
    """TRL's own default for the KL term."""
    trees, data = prepared(columns)
    theirs = theirs_grpo(grpo, data, loss_type="dapo", beta=0.5, low=0.2, high=0.2, ratio_kl=True)
    assert_same(ours_grpo(trees, reduction="token-mean", beta=0.5, low=0.2, high=0.2, ratio_kl=True), theirs)


@pytest.mark.parametrize("max_tokens", [None, 20])
def test_global_token_mean_over_micro_batches(grpo, columns, max_tokens):
    """DAPO's normaliser spans the batch: TRL in two micro-batches, ours in one or in several."""
    trees, data = prepared(columns)
    theirs = theirs_grpo(grpo, data, loss_type="dapo", beta=0.1, low=0.2, high=0.2, micro=2)
    assert len(model_batches(trees, max_tokens)) == (1 if max_tokens is None else 2)
    assert_same(ours_grpo(trees, reduction="token-mean", beta=0.1, low=0.2, high=0.2, max_tokens=max_tokens), theirs)


def test_entropy_bonus(grpo, columns):
    trees, data = prepared(columns)
    theirs = theirs_grpo(grpo, data, loss_type="grpo", beta=0.0, low=0.2, high=0.2, entropy=0.05)
    assert_same(ours_grpo(trees, reduction="sequence-mean", beta=0.0, low=0.2, high=0.2, entropy=0.05), theirs)


def test_sequence_level_ratio(grpo, columns):
    trees, data = prepared(columns)
    theirs = theirs_grpo(grpo, data, loss_type="grpo", beta=0.0, low=0.05, high=0.05, level="sequence")
    assert_same(ours_grpo(trees, reduction="sequence-mean", beta=0.0, low=0.05, high=0.05, level="sequence"), theirs)


def test_clip_metrics(grpo, columns):
    trees, data = prepared(columns)
    theirs_grpo(grpo, data, loss_type="bnpo", beta=0.1, low=0.2, high=0.28)
    metrics = grpo._metrics["train"]
    (batch,) = model_batches(trees)
    coef = reduction_coefficients(batch.weight, batch.sequence, "token-mean")
    with torch.no_grad():
        logp, _ = Policy(llama(), _Ids()).logprobs(batch, temperature=TEMPERATURE)
    ours = policy_loss(logp, batch.columns["old_logprob"], batch.advantage, coef, clip_low=0.2, clip_high=0.28).metrics
    assert ours["clip_ratio/low"] == pytest.approx(metrics["clip_ratio/low_mean"][-1], abs=1e-6)
    assert ours["clip_ratio/high"] == pytest.approx(metrics["clip_ratio/high_mean"][-1], abs=1e-6)
    assert kl_loss(logp, batch.columns["ref_logprob"], coef).metrics["kl"] == pytest.approx(metrics["kl"][-1], rel=1e-4)


def test_sft_loss_and_gradients(tokenizer, tmp_path):
    args = SFTConfig(str(tmp_path), max_length=None, packing=False, **SETTINGS)
    trainer = SFTTrainer(
        llama(), args, train_dataset=Dataset.from_dict({"text": ["w1 w2"] * 2}), processing_class=tokenizer
    )
    examples = [(prompt, completion) for p, prompt in enumerate(PROMPTS) for completion in COMPLETIONS[p]]
    long = max(len(p) + len(c) for p, c in examples)
    padded = [(p, c, long - len(p) - len(c)) for p, c in examples]
    data = {
        "input_ids": torch.tensor([p + c + [PAD] * n for p, c, n in padded]),
        "attention_mask": torch.tensor([[1] * (long - n) + [0] * n for _, _, n in padded]),
        "labels": torch.tensor([[-100] * len(p) + c + [-100] * n for p, c, n in padded]),
    }
    trainer.model.train()
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, data, num_items_in_batch=torch.tensor(sum(len(c) for _, c in examples)))
    loss.backward()

    model = llama()
    trees = []
    for prompt, completion in examples:
        tree = TokenTree(prompt)
        node = tree.add(0, completion)
        tree.weight[tree.span(node)] = 1
        trees.append(tree)
    (batch,) = pack(trees)
    coef = reduction_coefficients(batch.weight, batch.sequence, "token-mean")
    ours = sft_loss(Policy(model, _Ids()).logprobs(batch)[0], coef).loss
    ours.backward()
    assert_same((float(ours.detach()), gradients(model)), (float(loss.detach()), gradients(trainer.model)))


THREE = [([5, 9, 2, 31], [11, 4], [13, 14]), ([7, 1], [9, 9], [33, 12])]
"""Prompts and answers; with the end token all answers have three tokens."""
UNEQUAL = [([5, 9, 2, 31], [11, 4], [11, 4, 8, 8, 3]), ([7, 1], [33, 12, 45, 6, 7], [9, 9])]


@pytest.mark.parametrize(
    ("theirs", "loss", "pairs", "scale"),
    [
        ({"loss_type": "sigmoid"}, lambda *v: dpo_loss(*v, beta=0.2), UNEQUAL, 1.0),
        ({"loss_type": "hinge"}, lambda *v: dpo_loss(*v, beta=0.2, form="hinge"), UNEQUAL, 1.0),
        (
            {"loss_type": "robust", "label_smoothing": 0.1},
            lambda *v: dpo_loss(*v, beta=0.2, form="robust", label_smoothing=0.1),
            UNEQUAL,
            1.0,
        ),
        # Theirs divides each sum by its 3 tokens: (D/3 - 1/(2 beta))^2 = (D - 1/(2 beta/3))^2 / 9.
        ({"loss_type": "ipo"}, lambda *v: ipo_loss(*v, beta=0.2 / 3), THREE, 1 / 9),
    ],
    ids=["sigmoid", "hinge", "robust", "ipo"],
)
def test_preference_loss_and_gradients(tokenizer, tmp_path, theirs, loss, pairs, scale):
    model, reference = llama(), llama()
    with torch.no_grad():
        for p in reference.parameters():
            p.mul_(0.9)
    args = DPOConfig(str(tmp_path), beta=0.2, **theirs, **SETTINGS)
    text = [[" ".join(f"w{i}" for i in part) + " " for part in pair] for pair in pairs]
    data = Dataset.from_dict(
        dict(zip(("prompt", "chosen", "rejected"), map(list, zip(*text, strict=True)), strict=True))
    )
    trainer = DPOTrainer(model, reference, args, train_dataset=data, processing_class=tokenizer)
    inputs = trainer.data_collator([trainer.train_dataset[i] for i in range(2)])
    trainer.model.train()
    trainer.model.zero_grad()
    wanted = trainer.compute_loss(trainer.model, inputs)
    wanted.backward()

    made = []
    for row in (trainer.train_dataset[i] for i in range(2)):
        tree = TokenTree(row["prompt_ids"])
        chosen, rejected = (tree.add(0, row[name]) for name in ("chosen_ids", "rejected_ids"))
        tree.weight[tree.length[0] :] = 1
        made.append(PreferencePair(tree, chosen, rejected))
    ours = llama()
    policy = Policy(ours, _Ids())
    annotate(Policy(reference, _Ids()), made, REFERENCE)
    ((batch, mine),) = micro_batches(made, policy.layout, None, [REFERENCE])
    sums = Answers(batch, mine).sums
    values = [*sums(policy.logprobs(batch)[0]), *sums(batch.columns[REFERENCE])]
    out = loss(*values)
    (out.loss * scale).backward()
    assert_same((scale * float(out.loss.detach()), gradients(ours)), (float(wanted.detach()), gradients(trainer.model)))
    assert out.metrics["logps/chosen"] == pytest.approx(np.mean(trainer._metrics["train"]["logps/chosen"]), rel=1e-4)
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"):
        factor = 3 if scale != 1 and name != "rewards/accuracies" else 1  # their beta is three times ours there
        want = np.mean(trainer._metrics["train"][name])
        assert factor * out.metrics[name] == pytest.approx(want, rel=1e-3)
