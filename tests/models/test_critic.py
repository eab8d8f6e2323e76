"""The critic: values on trees against a plain forward, its switches, checkpoints and refusals."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from forethought.errors import ConfigError, ModelError
from forethought.models.critic import HEAD_FILE, Critic
from forethought.models.load import LoRA, load_model, save_pretrained
from forethought.models.policy import Policy
from forethought.models.tiny import char_tokenizer, tiny_model
from forethought.tree.pack import pack
from forethought.tree.tree import TokenTree
from tinymodels import CONFIGS, IntTokenizer, tiny


def a_tree():
    """A prompt, two answers, one of which goes on in two ways after an observation."""
    tree = TokenTree([5, 6, 7])
    first = tree.add(0, [8, 9], sampled=True)
    second = tree.add(0, [10, 11, 12], sampled=True)
    seen = tree.add(first, [13])
    ends = [tree.add(seen, [14, 15], sampled=True), tree.add(seen, [16], sampled=True)]
    for node in (first, second, *ends):
        tree.weight[tree.span(node)] = 1
    return tree, [second, *ends]


def random_heads(critic, seed=0):
    with torch.no_grad():
        torch.manual_seed(seed)
        critic.linear.weight.normal_()
        critic.linear.bias.normal_()
    return critic


def plain_values(critic, tree, leaf):
    """[T + 1, K]: value before each token of the path but the first, and after the last one."""
    with torch.no_grad():
        hidden = critic.trunk.decoder(input_ids=torch.tensor([tree.path_ids(leaf)])).last_hidden_state[0]
        return critic.linear(hidden).numpy()


@pytest.mark.parametrize("family", list(CONFIGS))
@pytest.mark.parametrize("layout", ["tree", "linear"])
@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_values_are_those_of_a_plain_forward(family, layout, kind):
    policy = Policy(tiny(family), IntTokenizer(), layout=layout)
    critic = random_heads(Critic(policy, kind=kind, heads=("a", "b")))
    if kind == "separate":
        with torch.no_grad():
            for p in critic.trunk.model.parameters():
                p.mul_(0.9)
    tree, ends = a_tree()
    (last,) = critic.score([tree], [ends], max_tokens=8)
    for leaf in ends:
        want = plain_values(critic, tree, leaf)
        where = tree.path_tokens(leaf)
        for k, name in enumerate(("value/a", "value/b")):
            got = tree.column(name)[where]
            trained = tree.weight[where] > 0
            np.testing.assert_allclose(got[trained], want[:-1][trained[1:]][:, k], atol=2e-4)
            assert np.isnan(got[~trained]).all()
        np.testing.assert_allclose(last[leaf], want[-1], atol=2e-4)


def test_one_forward_gives_values_and_logprobs():
    policy = Policy(tiny("llama"), IntTokenizer())
    critic = random_heads(Critic(policy))
    tree, _ = a_tree()
    calls = []
    policy.decoder.register_forward_hook(lambda *a: calls.append(1))
    critic.score([tree], [[]], logprob_column="old_logprob", temperature=0.7)
    assert len(calls) == 1
    ((batch, want),) = policy.score_tokens([tree], temperature=0.7)
    np.testing.assert_allclose(tree.column("old_logprob")[batch.token], want, atol=1e-6)
    assert "value" in tree.columns and critic.value_columns == ["value"] and critic.return_columns == ["return"]
    with pytest.raises(ConfigError, match="a separate critic has no log-probs of the policy"):
        Critic(policy, kind="separate").score([tree], [[]], logprob_column="old_logprob")


def test_an_empty_end_is_read_at_the_last_token_before_it():
    policy = Policy(tiny("llama"), IntTokenizer())
    critic = random_heads(Critic(policy))
    tree, ends = a_tree()
    empty = tree.add(ends[1], [])
    (last,) = critic.score([tree], [[ends[1], empty]])
    assert last[empty] == last[ends[1]]


def test_a_new_critic_says_zero():
    tree, _ = a_tree()
    for kind in ("shared", "separate"):
        policy = Policy(tiny("llama"), IntTokenizer())
        Critic(policy, kind=kind).score([tree], [[]])
        assert (tree.column("value")[tree.weight > 0] == 0).all()


def test_who_gets_a_gradient():
    tree, _ = a_tree()
    policy = Policy(tiny("qwen2"), IntTokenizer())  # its head is not tied
    shared, separate = random_heads(Critic(policy)), random_heads(Critic(policy, kind="separate"))
    (batch,) = pack([tree])
    shared.values(batch).sum().backward()
    assert policy.decoder.embed_tokens.weight.grad is not None and shared.linear.weight.grad is not None
    policy.model.zero_grad()
    separate.values(batch).sum().backward()
    assert policy.decoder.embed_tokens.weight.grad is None
    assert separate.trunk.decoder.embed_tokens.weight.grad is not None
    names = {n for n, p in separate.model.named_parameters() if p.requires_grad}
    assert "trunk.lm_head.weight" not in names and "heads.weight" in names
    assert {n for n, _ in shared.model.named_parameters()} == {"heads.weight", "heads.bias"}
    assert policy.head.weight.requires_grad


CHARS = "0123456789+=-()"


def saved_policy(folder, **kwargs):
    tokenizer = char_tokenizer(CHARS)
    policy = Policy(tiny_model(len(tokenizer), width=32, heads=2, layers=1, init_std=0.2, **kwargs), tokenizer)
    save_pretrained(policy.model, tokenizer, folder)
    return policy


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_a_checkpoint_with_a_critic_loads_everywhere(kind, tmp_path):
    """Transformers takes the folder as it is, and the critic comes back with the same values."""
    policy = saved_policy(tmp_path)
    critic = random_heads(Critic(policy, kind=kind, heads=("right", "long"), trunk_gradient=False))
    critic.save(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(model(input_ids=ids).logits, policy.model(input_ids=ids).logits)
    again = Critic.load(tmp_path, Policy(*load_model(tmp_path, dtype="fp32", device="cpu")))
    assert (again.kind, again.heads, again.trunk_gradient) == (kind, ("right", "long"), False)
    tree, ends = a_tree()
    (batch,) = pack([tree])
    torch.testing.assert_close(again.values(batch), critic.values(batch))
    assert (tmp_path / "critic" / "model.safetensors").exists() == (kind == "separate")


def test_masters_are_what_is_saved(tmp_path):
    policy = saved_policy(tmp_path)
    critic = Critic(policy, kind="separate")
    masters = {n: torch.full_like(p, 0.25) for n, p in critic.model.named_parameters() if p.requires_grad}
    critic.save(tmp_path, masters=masters)
    again = Critic.load(tmp_path, policy)
    assert all(bool((p == 0.25).all()) for p in again.model.parameters())


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_lora(kind, tmp_path):
    """The adapter alone is trained and saved; a separate critic has an adapter of its own."""
    saved_policy(tmp_path / "base")
    policy = Policy(*load_model(tmp_path / "base", dtype="fp32", device="cpu", lora=LoRA(rank=2)))
    critic = random_heads(Critic(policy, kind=kind))
    names = {n for n, p in critic.model.named_parameters() if p.requires_grad}
    assert names >= {"heads.weight", "heads.bias"}
    assert all("lora_" in n for n in names if n.startswith("trunk.")) and (kind == "shared") == (len(names) == 2)
    tree, _ = a_tree()
    (batch,) = pack([tree])
    if kind == "separate":
        with torch.no_grad():
            for n, p in critic.trunk.model.named_parameters():
                if "lora_B" in n:
                    p.fill_(0.1)
        assert not torch.allclose(critic.values(batch), random_heads(Critic(policy)).values(batch))
    save_pretrained(policy.model, policy.tokenizer, tmp_path / "mine")
    critic.save(tmp_path / "mine")
    again = Critic.load(tmp_path / "mine", policy)
    torch.testing.assert_close(again.values(batch), critic.values(batch))


def test_other_tokenizers_are_refused():
    mine, theirs = char_tokenizer(CHARS), char_tokenizer(CHARS[::-1])
    policy = Policy(tiny_model(len(mine), width=32, heads=2, layers=1), mine)
    other = Policy(tiny_model(len(theirs), width=32, heads=2, layers=1), theirs)
    with pytest.raises(
        ModelError,
        match="different tokenizers: token '0' is 3 in the policy's and token '0' is 17 in the critic's; .*give one with "
        "the same tokenizer",
    ):
        Critic(policy, kind="separate", trunk=other)
    longer = char_tokenizer(CHARS + "*")
    more = Policy(tiny_model(len(longer), width=32, heads=2, layers=1), longer)
    with pytest.raises(ModelError, match=r"token '\*' is absent in the policy's and token '\*' is 18 in the critic's"):
        Critic(policy, kind="separate", trunk=more)
    small = Policy(tiny_model(9, width=32, heads=2, layers=1), mine)
    with pytest.raises(ModelError, match="the policy has 18 token ids, the critic embeds 9"):
        Critic(policy, kind="separate", trunk=small)


def test_what_is_no_critic_is_refused(tmp_path):
    policy = saved_policy(tmp_path)
    with pytest.raises(ConfigError, match=r"critic heads=\('a', 'a'\): give at least one name, each once"):
        Critic(policy, heads=("a", "a"))
    with pytest.raises(ConfigError, match="critic kind='both'"):
        Critic(policy, kind="both")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a shared critic reads the policy's own trunk"):
        Critic(policy, trunk=policy)
    with pytest.raises(ModelError, match="saved without a critic"):
        Critic.load(tmp_path, policy)
    Critic(policy).save(tmp_path)
    wide = Policy(tiny_model(len(CHARS) + 3, width=64, heads=2, layers=1), policy.tokenizer)
    with pytest.raises(ModelError, match=r"its weight has shape \(1, 32\), this model needs \(1, 64\)"):
        Critic.load(tmp_path, wide)
    (tmp_path / HEAD_FILE).write_bytes(b"rubbish")
    with pytest.raises(ModelError, match="is not a value head of this package"):
        Critic.load(tmp_path, policy)
