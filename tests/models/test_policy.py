"""Policy: the linear fallback, end tokens, the head's numbers, frozen copies, scoring, what is saved after training."""

import json

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GenerationMixin,
    GraniteConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutput

from forethought.errors import EngineError, ModelError
from forethought.learn.learner import Learner
from forethought.learn.offline import sft_objective
from forethought.learn.optim import OptimConfig
from forethought.models.policy import Policy
from forethought.models.tiny import char_tokenizer, tiny_model
from forethought.models.torch_engine import TorchEngine
from forethought.tree.pack import pack, write_back
from forethought.tree.tree import TokenTree
from tinymodels import IntTokenizer, tiny


class RecurrentConfig(PretrainedConfig):
    model_type = "test_recurrent"

    def __init__(self, vocab_size=23, hidden_size=16, **kwargs):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        super().__init__(**kwargs)


class Recurrent(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rnn = nn.GRU(config.hidden_size, config.hidden_size, batch_first=True)

    def forward(self, input_ids, attention_mask=None, use_cache=False):
        return BaseModelOutputWithPast(last_hidden_state=self.rnn(self.embed(input_ids))[0])


class RecurrentLM(PreTrainedModel, GenerationMixin):
    """A state that runs along the row: no attention to route, and right padding does not matter to it."""

    config_class = RecurrentConfig

    def __init__(self, config):
        super().__init__(config)
        self.inner = Recurrent(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=True)
        self.post_init()

    def get_decoder(self):
        return self.inner

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, **kwargs):
        return CausalLMOutput(logits=self.lm_head(self.inner(input_ids).last_hidden_state))


class ClaimsTooMuch(RecurrentLM):
    """Says that its attention can be routed, and takes no positions."""

    _supports_attention_backend = True


class IgnoresTheMask(RecurrentLM):
    """Says that its attention can be routed, takes positions, and reads the packed tree as one row."""

    _supports_attention_backend = True

    def __init__(self, config):
        super().__init__(config)
        inner = self.inner.forward
        self.inner.forward = lambda input_ids, position_ids=None, **kw: inner(input_ids)


def make(kind):
    """A model of these classes with weights far from uniform."""
    torch.manual_seed(0)
    model = kind(RecurrentConfig()).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.6)
    return model


def forest():
    """Two branching trees of ids below 23; weights count paths."""
    trees = []
    for root, shared, ends in (([5, 9, 3], [11, 12], ([13], [14, 15, 16])), ([7], [8], ([4, 6], [10]))):
        tree = TokenTree(root)
        middle = tree.add(0, shared)
        tree.weight[tree.span(middle)] = 2
        for ids in ends:
            node = tree.add(middle, ids)
            tree.weight[tree.span(node)] = 1
        trees.append(tree)
    return trees


def plain_logprobs(model, tree, leaf, temperature=1.0):
    """Log-probs of a path's tokens from the second on, by the model's own forward."""
    ids = torch.tensor([tree.path_ids(leaf)])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float() / temperature
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def assert_scores_are_plain(policy, model, trees, temperature=1.0, max_tokens=8192):
    for batch, values in policy.score_tokens(trees, temperature=temperature, max_tokens=max_tokens):
        write_back(trees, batch, "scored", values)
    for tree in trees:
        for leaf in tree.leaves():
            with torch.no_grad():
                want = plain_logprobs(model, tree, leaf, temperature)
            got = torch.from_numpy(tree.column("scored")[tree.path_tokens(leaf)])
            trained = torch.from_numpy(tree.weight[tree.path_tokens(leaf)] > 0)
            assert bool(torch.isnan(got[~trained]).all()) and int(trained.sum()) > 1
            torch.testing.assert_close(got[trained], want[trained[1:]], atol=1e-5, rtol=1e-4)


# -- models without routable attention --
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (RecurrentLM, "RecurrentLM: its attention cannot be routed by name; use layout='linear'"),
        (ClaimsTooMuch, "its forward does not take a token tree .*position_ids"),
        (IgnoresTheMask, "its log-probs over a tree differ from a plain forward by 0"),
    ],
)
def test_a_model_that_cannot_do_trees_runs_linear_rows(kind, reason):
    model = make(kind)
    policy = Policy(model, IntTokenizer())
    assert policy.layout == "linear" and not model.training
    with pytest.raises(ModelError, match=reason):
        Policy(model, IntTokenizer(), layout="tree")
    assert_scores_are_plain(policy, model, forest())
    assert_scores_are_plain(policy, model, forest(), max_tokens=9)
    with pytest.raises(EngineError, match=f"{kind.__name__} cannot route its attention"):
        TorchEngine(policy)
    learner = Learner(policy, OptimConfig(lr=0.05), total_steps=20)
    losses = [learner.update(forest(), sft_objective)["loss"] for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]


def test_a_failed_check_leaves_the_model_in_its_mode():
    model = make(IgnoresTheMask).train()
    assert Policy(model, IntTokenizer()).layout == "linear" and model.training
    model = tiny("llama").train()
    assert Policy(model, IntTokenizer()).layout == "tree" and model.training


# -- the head's numbers --
def _scaled(kind):
    sizes = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    ids = dict(pad_token_id=0, bos_token_id=2, eos_token_id=1)
    torch.manual_seed(0)
    config = CohereConfig(**sizes, **ids, logit_scale=0.25) if kind == "cohere" else GraniteConfig(
        **sizes, **ids, logits_scaling=4.0, embedding_multiplier=2.0
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(5)
    return model


@pytest.mark.parametrize("kind", ["gemma2", "cohere", "granite"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_softcap_and_logit_scale(kind, temperature):
    """Gemma 2 caps its logits at 5 here, Cohere and Granite divide them by 4; the temperature comes after."""
    model = tiny("gemma2") if kind == "gemma2" else _scaled(kind)
    if kind == "gemma2":
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(5)  # tied
    policy = Policy(model, IntTokenizer(), layout="tree")
    (batch,) = pack(forest()[:1])
    with torch.no_grad():
        hidden = policy.hidden(batch)
        ids = batch.ids[None, :5]  # the root and its first child are an ordinary row
        want = model(input_ids=ids, use_cache=False).logits[0]
        got = policy.logits(hidden[:5])
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
        raw = policy.head(hidden[:5])
        assert float((raw - want).abs().max()) > 0.1  # the cap, or the scale, bites
        logp, entropy = policy.head_logprobs(hidden[:5], ids[0], temperature=temperature, entropy=True)
    full = (want / temperature).log_softmax(-1)
    torch.testing.assert_close(logp, full.gather(1, ids[0][:, None])[:, 0], atol=1e-5, rtol=1e-4)
    assert entropy is not None
    torch.testing.assert_close(entropy, -(full.exp() * full).sum(-1), atol=1e-5, rtol=1e-4)
    assert_scores_are_plain(policy, model, forest(), temperature)


def test_scores_do_not_depend_on_the_budget_and_carry_no_gradient():
    policy = Policy(tiny("llama"), IntTokenizer())
    assert_scores_are_plain(policy, policy.model, forest(), temperature=1.7)
    found = policy.score_tokens(forest(), max_tokens=8)
    assert len(found) > 1 and all(batch.n_tokens <= 8 and not values.requires_grad for batch, values in found)
    assert_scores_are_plain(policy, policy.model, forest(), max_tokens=8)
    untrained = TokenTree([5, 6])
    assert policy.score_tokens([untrained]) == []


# -- end tokens --
def test_end_tokens_come_from_tokenizer_generation_config_and_caller():
    model = tiny("llama")
    model.generation_config.eos_token_id = [7, 1, 9]
    assert Policy(model, IntTokenizer()).eos_ids == (1, 7, 9)
    policy = Policy(model, IntTokenizer(), end_ids=(9, 11))
    assert policy.eos_ids == (1, 7, 9, 11) and policy.frozen_copy().eos_ids == (1, 7, 9, 11)
    model.generation_config.eos_token_id = 7
    assert Policy(model, IntTokenizer()).eos_ids == (1, 7)
    model.generation_config.eos_token_id = None

    class Endless(IntTokenizer):
        eos_token_id = None
        pad_token_id = None

    policy = Policy(model, Endless())
    assert policy.eos_ids == () and policy.pad_id == 0
    assert Policy(model, Endless(), end_ids=[5]).pad_id == 5


def test_the_renderers_end_of_turn_reaches_the_sampler(tmp_path):
    """A chat template that ends turns with a token of its own, which neither tokenizer nor config name as an end."""
    from forethought.models.engine import Sampling
    from forethought.models.load import save_pretrained
    from forethought.recipes.session import open_model
    from forethought.tree.tree import Stop

    template = (
        "{% for m in messages %}<user>{{ m['content'] }}<turn>{% endfor %}"
        "{% if add_generation_prompt %}<user>{% endif %}"
    )
    tokenizer = char_tokenizer("abc", specials=["<user>", "<turn>"], chat_template=template)
    turn = tokenizer.convert_tokens_to_ids("<turn>")
    save_pretrained(tiny_model(len(tokenizer), width=32), tokenizer, tmp_path)
    bench = open_model(str(tmp_path), device="cpu", dtype="fp32", train=True, say=lambda line: None)
    assert bench.policy.eos_ids == (2, turn) and bench.renderer.end_ids == (turn, 2)
    with torch.no_grad():
        bench.policy.head.weight[turn] = 0  # tied: its own embedding too
    tree = TokenTree(bench.prompt_ids({"prompt": "ab"}))
    learner = Learner(bench.policy, OptimConfig(lr=0.05), total_steps=30)
    taught = TokenTree(tree.node_ids(0))
    node = taught.add(0, [*tokenizer.encode("c"), turn])
    taught.weight[taught.span(node)] = 1
    for _ in range(30):
        learner.update([taught], sft_objective)
    ((written,),) = bench.engine.extend([(tree, 0)], 1, Sampling(max_tokens=8, temperature=0))
    assert tree.node_ids(written) == taught.node_ids(node) and tree.stop[written] == Stop.EOS


# -- frozen copies --
def _step(policy, steps=3):
    learner = Learner(policy, OptimConfig(lr=0.05), total_steps=steps)
    for _ in range(steps):
        learner.update(forest(), sft_objective)
    return learner


def _scores(policy):
    return torch.cat([values for _, values in policy.score_tokens(forest())])


def test_a_frozen_copy_stays_when_the_policy_moves():
    policy = Policy(tiny("llama"), IntTokenizer())
    before = _scores(policy)
    reference = policy.frozen_copy()
    assert not any(p.requires_grad for p in reference.model.parameters()) and reference.layout == "tree"
    assert all(p.requires_grad for p in policy.model.parameters())
    _step(policy)
    assert torch.equal(_scores(reference), before)
    assert float((_scores(policy) - before).abs().max()) > 0.1
    pointers = {p.data_ptr() for p in policy.model.parameters()}
    assert not pointers & {p.data_ptr() for p in reference.model.parameters()}


def test_the_reference_of_a_lora_policy_is_its_base_model_without_a_copy():
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(tiny("llama"), peft.LoraConfig(r=4, target_modules="all-linear"))
    policy = Policy(adapted, IntTokenizer(), end_ids=(40,))
    before = _scores(policy)  # a fresh adapter adds nothing
    reference = policy.frozen_copy()
    assert reference.model is policy.model and reference.eos_ids == policy.eos_ids == (1, 40)
    base = {n: p.detach().clone() for n, p in policy.model.named_parameters() if "lora" not in n}
    _step(policy)
    assert torch.equal(_scores(reference), before)
    trained = _scores(policy)  # and the adapter is on again after the reference was asked
    assert float((trained - before).abs().max()) > 0.1
    assert torch.equal(_scores(policy), trained)
    assert all(torch.equal(p, base[n]) for n, p in policy.model.named_parameters() if n in base)


# -- what is saved --
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_a_trained_model_loads_with_transformers_and_gives_the_same_logits(tmp_path, family):
    tokenizer = char_tokenizer("abcdefghijklmnopqrst")
    policy = Policy(tiny_model(len(tokenizer), family=family, width=32, init_std=0.2), tokenizer)
    learner = _step(policy, 1)
    learner.save_model(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([[5, 9, 3, 11, 12, 13]])
    policy.model.eval()
    with torch.no_grad():
        assert loaded.dtype == torch.float32
        assert torch.equal(loaded(input_ids=ids).logits, policy.model(input_ids=ids).logits)


def test_a_bf16_run_saves_its_fp32_masters(tmp_path):
    tokenizer = char_tokenizer("abcdefghijklmnopqrst")
    policy = Policy(tiny_model(len(tokenizer), width=32, init_std=0.2), tokenizer)
    learner = Learner(policy, OptimConfig(lr=1e-4), total_steps=2, compute=torch.bfloat16)
    for _ in range(2):
        learner.update(forest(), sft_objective)
    learner.save_model(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    masters = learner.optimizer.master_state()
    for name, p in loaded.named_parameters():
        assert p.dtype == torch.float32 and torch.equal(p, masters[name]), name
    assert any(bool((p != p.bfloat16().float()).any()) for p in loaded.parameters())  # more than bf16 can hold
    ids = torch.tensor([[5, 9, 3, 11, 12, 13]])
    policy.model.eval()
    with torch.no_grad():
        running = policy.model(input_ids=ids).logits
        assert running.dtype == torch.bfloat16
        rounded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert torch.equal(rounded(input_ids=ids).logits, running)
