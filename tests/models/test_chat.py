"""Token in, token out: masks, borders, beginnings and ends, further turns, and templates that rewrite their history."""

import json
import logging

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from forethought.errors import ConfigError, DataError, ModelError
from forethought.models.chat import CHATML, ChatRenderer, as_messages, preference_tree, sft_tree, sft_trees
from forethought.models.tiny import byte_tokenizer, char_tokenizer
from forethought.tree.tree import Kind, Stop, TokenTree

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PRINTED = LETTERS + LETTERS.upper() + "0123456789 \n!?.+-=<>/|:[]_'"
MARKS = ["<|im_start|>", "<|im_end|>"]


def chatml(template=CHATML, **kw) -> ChatRenderer:
    return ChatRenderer(char_tokenizer(PRINTED, specials=MARKS, chat_template=template), **kw)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


def targets(tree: TokenTree) -> list[int]:
    return tree.ids[tree.weight > 0].tolist()


def sample(r: ChatRenderer, tree: TokenTree, node: int, text: str, *, end=True) -> int:
    ids = r.encode(text) + ([r.end_id] if end else [])
    return tree.add(node, ids, sampled=True, logprobs=[-1.0] * len(ids), stop=Stop.EOS if end else Stop.LENGTH)


def pieces_tokenizer(pieces: list[str], merges=()) -> PreTrainedTokenizerFast:
    """Longest pieces first, by BPE merges; the ids are the places in the list. No special tokens of its own."""
    tok = Tokenizer(BPE({p: i for i, p in enumerate(pieces)}, list(merges)))
    tok.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tok)


# -- masks -----------------------------------------------------------------------------------------------------------

TOY = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOY_MARKS = ["<system>", "<user>", "<assistant>", "<end>"]
H07 = [system("s"), user("u1"), assistant("ok"), user("u2"), assistant("no!")]


def toy() -> ChatRenderer:
    return ChatRenderer(char_tokenizer(LETTERS + "12!", specials=TOY_MARKS, chat_template=TOY))


def test_h07_assistant_text_and_its_end_tokens_are_the_targets():
    r = toy()
    tree = sft_tree(r, {"messages": H07})
    (leaf,) = tree.leaves()
    ids = tree.path_ids(leaf)
    assert len(ids) == 20
    assert ids == r.encode(r.render(H07, add_generation_prompt=False))
    mask = tree.weight[tree.path_tokens(leaf)]
    assert r.tokenizer.convert_ids_to_tokens([i for i, w in zip(ids, mask, strict=True) if w]) == list("ok") + [
        "<end>",
        *"no!",
        "<end>",
    ]
    assert mask.sum() == 7 and set(mask.tolist()) == {0.0, 1.0}
    assert [Kind(k).name for k in tree.kind] == ["PROMPT", "ASSISTANT", "USER", "ASSISTANT"]


def test_no_assistant_turn_means_no_target_and_a_batch_without_any_is_refused():
    r = toy()
    assert sft_tree(r, {"messages": H07[:2]}).weight.sum() == 0
    trees = sft_trees(r, [{"messages": H07[:2]}, {"messages": H07}])
    assert [int(t.weight.sum()) for t in trees] == [0, 7]
    with pytest.raises(DataError, match="no target in any of 2 records: none has an assistant turn"):
        sft_trees(r, [{"messages": H07[:2]}] * 2)
    with pytest.raises(DataError, match="within max_length=3"):
        sft_trees(r, [{"messages": H07}], max_length=3)


def test_only_the_completion_of_a_conversation_is_trained():
    r = toy()
    tree = sft_tree(r, {"prompt": H07[:4], "completion": [H07[4]]})
    assert r.tokenizer.convert_ids_to_tokens(targets(tree)) == ["n", "o", "!", "<end>"]
    assert tree.n_tokens == 20
    assert tree.node_ids(0) == r.prompt_ids(H07[:4])


def test_training_paths_are_laid_out_as_sampled_ones():
    r = chatml()
    tree, node = r.start([system("be brief"), user("hi")], task="t", seed=3)
    node = sample(r, tree, node, "hello")
    node = r.extend_turn(tree, node, "more?")
    node = sample(r, tree, node, "no")
    trained = sft_tree(r, {"messages": r.display(tree, node)})
    (leaf,) = trained.leaves()
    assert trained.path_ids(leaf) == tree.path_ids(node)
    assert [trained.node_ids(n) for n in trained.path(leaf)] == [tree.node_ids(n) for n in tree.path(node)]
    assert (tree.task, tree.seed) == ("t", 3)


# -- H08, H03: ends and cuts -----------------------------------------------------------------------------------------


class Digits(PreTrainedTokenizerFast):
    """Text "5 6 7" is ids [5, 6, 7]; pad and end are both id 2."""

    def __init__(self):
        tok = Tokenizer(BPE({str(i): i for i in range(50)}, [("1", str(i)) for i in ()]))
        super().__init__(tokenizer_object=tok, eos_token="2", pad_token="2")

    def encode(self, text, add_special_tokens=True, **kw):
        return [int(t) for t in text.split()]

    def decode(self, ids, **kw):
        return " ".join(map(str, ids))


def test_h08_targets_come_from_lengths_though_pad_is_the_end():
    r = ChatRenderer(Digits())
    assert r.tokenizer.pad_token_id == r.tokenizer.eos_token_id == 2
    rows = [("5", "6 7"), ("5", "8"), ("5", "9 9 9 9 9 9 9")]
    trees = [sft_tree(r, {"prompt": p, "completion": c}, max_length=6) for p, c in rows]
    assert [t.path_ids(t.leaves()[0]) for t in trees] == [[5, 6, 7, 2], [5, 8, 2], [5, 9, 9, 9, 9, 9]]
    assert [targets(t) for t in trees] == [[6, 7, 2], [8, 2], [9, 9, 9, 9, 9]]
    assert sum(int(t.weight.sum()) for t in trees) == 10


def test_h03_cutting_from_the_left_is_done_row_by_row():
    tok = Digits()
    tok._eos_token = None
    tok._special_tokens_map["eos_token"] = None
    r = ChatRenderer(tok)
    first = sft_tree(r, {"prompt": "11 12 13 14 15 16", "completion": "21 22 23"}, max_length=5, keep="end")
    second = sft_tree(r, {"prompt": "31", "completion": "41 42"}, max_length=5, keep="end")
    assert first.path_ids(first.leaves()[0]) == [15, 16, 21, 22, 23] and targets(first) == [21, 22, 23]
    assert second.path_ids(second.leaves()[0]) == [31, 41, 42] and targets(second) == [41, 42]


def test_a_cut_inside_the_answer_leaves_its_first_token_without_a_target():
    r = ChatRenderer(Digits())
    tree = sft_tree(r, {"prompt": "5 6", "completion": "7 8 9"}, max_length=3, keep="end")
    assert tree.path_ids(tree.leaves()[0]) == [8, 9, 2]
    assert targets(tree) == [9, 2]  # nothing precedes the 8


@pytest.mark.parametrize("length", range(1, 21))
@pytest.mark.parametrize("keep", ["start", "end"])
def test_cuts_of_a_conversation(length, keep):
    r = toy()
    whole = sft_tree(r, {"messages": H07})
    ids, mask = whole.ids.tolist(), whole.weight.tolist()
    cut = sft_tree(r, {"messages": H07}, max_length=length, keep=keep)
    part = slice(0, length) if keep == "start" else slice(20 - length, 20)
    assert cut.path_ids(cut.leaves()[0]) == ids[part]
    want = mask[part]
    want[0] = 0.0
    assert cut.weight[cut.path_tokens(cut.leaves()[0])].tolist() == want


@pytest.mark.parametrize("kw", [{"max_length": 0}, {"keep": "left"}])
def test_bad_cut_settings(kw):
    with pytest.raises(ConfigError, match=next(iter(kw))):
        sft_tree(toy(), {"messages": H07}, **kw)


# -- H34, H09: borders and ids ---------------------------------------------------------------------------------------


def test_h34_a_piece_never_spans_prompt_and_answer():
    tok = pieces_tokenizer(["x", "=", "4", "=4", "<e>"], [("=", "4")])
    tok.add_special_tokens({"eos_token": "<e>"})
    assert tok.encode("x=4") == [0, 3]
    r = ChatRenderer(tok)
    tree = sft_tree(r, {"prompt": "x=", "completion": "4"})
    assert tree.path_ids(tree.leaves()[0]) == [0, 1, 2, 4]
    assert targets(tree) == [2, 4]
    pair = preference_tree(r, {"prompt": "x=", "chosen": "4", "rejected": "x"})
    assert [pair.path_ids(n) for n in pair.leaves()] == [[0, 1, 2, 4], [0, 1, 0, 4]]


def test_h34_also_at_the_border_of_a_template():
    # The header ends with a newline and the answer begins with one; "\n\n" is a piece.
    alphabet = [*LETTERS, "\n", "\n\n", "<|im_start|>", "<|im_end|>"]
    tok = pieces_tokenizer(alphabet, [("\n", "\n")])
    tok.add_special_tokens({"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"})
    r = ChatRenderer(tok)
    tree = sft_tree(r, {"messages": [user("a"), assistant("\nb")]})
    one, two = tok.convert_tokens_to_ids("\n"), tok.convert_tokens_to_ids("\n\n")
    assert tree.node_ids(0) == r.prompt_ids([user("a")]) and tree.node_ids(0)[-1] == one
    assert tree.node_ids(1)[0] == one and two not in tree.ids


def test_h09_sampled_ids_are_never_encoded_again():
    tok = pieces_tokenizer(["<e>", "a", "b", "ab", "u", "\n"], [("a", "b")])
    tok.add_special_tokens({"eos_token": "<e>"})
    assert tok.encode("ab") == [3]
    r = ChatRenderer(tok)
    tree, node = r.start([user("u")])
    node = tree.add(node, [1, 2, 0], sampled=True, logprobs=[-1.2, -0.9, -0.1], stop=Stop.EOS)
    before = tree.path_ids(node)
    later = r.extend_turn(tree, node, "u")
    assert tree.parent[later] == node
    assert tree.path_ids(later)[: len(before)] == before == [4, 5, 1, 2, 0]
    assert r.display(tree, later)[1] == assistant("ab")
    assert tree.logprob[tree.span(node)].tolist() == pytest.approx([-1.2, -0.9, -0.1])


def test_an_artificial_space_of_the_tokenizer_does_not_enter_the_answer():
    words = ["<unk>", "<e>", "▁q", "▁a", "a", "q", "▁", ":"]
    tok = Tokenizer(BPE({w: i for i, w in enumerate(words)}, [("▁", "q"), ("▁", "a")], unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tok.decoder = decoders.Metaspace(prepend_scheme="first")
    tok.add_special_tokens([AddedToken("<e>", special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<e>")
    assert fast.encode("a") == [3]  # alone: with a space
    r = ChatRenderer(fast)
    tree = sft_tree(r, {"prompt": "q:", "completion": "a"})
    assert tree.path_ids(1) == [2, 7, 4, 1]  # in place: without


# -- H32: one beginning ----------------------------------------------------------------------------------------------

BOS_TEMPLATE = "{{ bos_token }}" + TOY


def bos_count(ids) -> int:
    return list(ids).count(1)


@pytest.mark.parametrize("template", [BOS_TEMPLATE, "{{ bos_token + bos_token }}" + TOY])
def test_h32_one_beginning_token_in_all_paths(template):
    tok = char_tokenizer(LETTERS, specials=TOY_MARKS, add_bos=True, chat_template=template)
    r = ChatRenderer(tok)
    assert r.bos_id == 1
    chat = [user("u"), assistant("ok")]
    prompt = r.prompt_ids(chat[:1])
    sft = sft_tree(r, {"messages": chat})
    pair = preference_tree(r, {"prompt": chat[:1], "chosen": chat[1:], "rejected": [assistant("no")]})
    started, node = r.start(chat[:1])
    extended = r.extend_turn(started, sample(r, started, node, "ok"), "more")
    for ids in (prompt, sft.ids, pair.ids, started.path_ids(extended)):
        assert ids[0] == 1 and bos_count(ids) == 1
    assert sft.path_ids(1) == [*prompt, *r.encode("ok"), r.end_id]


def test_h32_raw_text_gets_exactly_one():
    tok = char_tokenizer(LETTERS, specials=TOY_MARKS, add_bos=True, chat_template=BOS_TEMPLATE)
    r = ChatRenderer(tok)
    assert r.prompt_ids("ab") == [1, *r.encode("ab")]
    assert r.prompt_ids("<bos>ab") == [1, *r.encode("ab")]
    assert bos_count(sft_tree(r, {"prompt": "a", "completion": "b"}).ids) == 1
    assert bos_count(sft_tree(r, {"text": "ab"}).ids) == 1
    assert bos_count(preference_tree(r, {"prompt": "a", "chosen": "b", "rejected": "c"}).ids) == 1
    assert r.prompt_ids("") == [1]


def test_the_template_decides_and_the_fallback_adds_one():
    assert (
        ChatRenderer(char_tokenizer(LETTERS, specials=TOY_MARKS, add_bos=True, chat_template=TOY)).prompt_ids(
            [user("u")]
        )[0]
        != 1
    )
    plain = ChatRenderer(char_tokenizer(LETTERS, add_bos=True))
    assert plain.prompt_ids([user("u")]) == [1, *plain.encode("u")]
    none = ChatRenderer(char_tokenizer(LETTERS))
    assert none.bos_id is None and none.prompt_ids("u") == none.encode("u")


def test_h32_with_ids_of_the_case():
    tok = pieces_tokenizer(["<unk>", "<s>", *map(chr, range(97, 117))])
    tok.add_special_tokens({"bos_token": "<s>"})
    from tokenizers import processors

    tok.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    names = tok.convert_ids_to_tokens([10, 20, 11, 12])
    tok.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    r = ChatRenderer(tok)
    text = "".join(names)
    assert r.prompt_ids([user(text)]) == [1, 10, 20, 11, 12]
    assert r.prompt_ids(text) == [1, 10, 20, 11, 12]


# -- templates and their fallbacks -----------------------------------------------------------------------------------


def test_prompts_equal_the_tokenizers_own_rendering():
    r = chatml()
    chat = [system("s"), user("What is 7 + 5?")]
    own = r.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert r.prompt_ids(chat) == own
    assert r.style == "template" and r.end_text == "<|im_end|>" and r.end_ids == (r.end_id, 2)


def test_chatml_where_only_its_tokens_are_there():
    r = chatml(template=None)
    assert r.style == "chatml"
    assert r.tokenizer.decode(r.prompt_ids([user("hi")])) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert r.end_text == "<|im_end|>"


def test_plain_text_where_nothing_is_there():
    tok = char_tokenizer(PRINTED)
    r = ChatRenderer(tok)
    assert r.style == "plain" and (r.end_id, r.end_ids) == (2, (2,))
    tree, node = r.start([system("s"), user("hi")])
    assert tok.decode(tree.path_ids(node)) == "s\nhi\n"
    node = r.extend_turn(tree, sample(r, tree, node, "ok"), "more")
    assert tok.decode(tree.path_ids(node)) == "s\nhi\nok<eos>more\n"
    # An alphabet without newline: nothing stands between.
    bare = ChatRenderer(char_tokenizer(LETTERS))
    assert bare.tokenizer.decode(bare.prompt_ids([user("ab"), user("c")])) == "abc"
    with pytest.raises(DataError, match=r"messages\[0\]: the tokenizer has no chat template, so only text"):
        bare.prompt_ids([{"role": "user", "content": [{"type": "image"}]}])
    assert bare.prompt_ids([{"role": "user", "content": [{"type": "text", "text": "ab"}]}]) == bare.encode("ab")


def test_without_end_and_pad_token():
    tok = pieces_tokenizer(list(LETTERS))
    r = ChatRenderer(tok)
    assert (r.style, r.end_id, r.end_ids, r.bos_id) == ("plain", None, (), None)
    tree = sft_tree(r, {"messages": [user("ab"), assistant("cd")]})
    assert r.text(tree.ids) == "abcd" and r.text(targets(tree)) == "cd"


def test_a_template_of_ones_own_and_its_options():
    r = chatml(template=None)
    mine = "{% for m in messages %}[{{ m['content'] }}{% if loud %}!{% endif %}]{% endfor %}"
    loud = ChatRenderer(r.tokenizer, template=mine, options={"loud": True})
    assert loud.render([user("a"), assistant("b")], add_generation_prompt=False) == "[a!][b!]"
    # No special token ends the answer: the tokenizer's end token does, in the ids only.
    assert loud.end_id == r.tokenizer.eos_token_id and loud.end_text == ""
    tree = sft_tree(loud, {"messages": [user("a"), assistant("b"), user("c"), assistant("d")]})
    assert r.tokenizer.decode(tree.path_ids(tree.leaves()[0])).count("<eos>") == 2


def test_templates_that_cannot_be_used():
    tok = char_tokenizer(PRINTED)
    with pytest.raises(ModelError, match="drops the assistant's text"):
        ChatRenderer(tok, template="{{ messages[0]['content'] }}")
    with pytest.raises(ModelError, match="cannot render a user and an assistant message"):
        ChatRenderer(tok, template="{{ raise_exception('no') }}")
    strict = ChatRenderer(
        tok,
        template="{% for m in messages %}{% if m['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}{{ m['content'] }}{% endfor %}",
    )
    with pytest.raises(
        DataError, match="refuses a conversation with the roles system, user: System role not supported"
    ):
        strict.prompt_ids([system("s"), user("u")])


# -- further turns ---------------------------------------------------------------------------------------------------


def check_turns(r: ChatRenderer, chat: list[dict]) -> TokenTree:
    """Sampled turn by turn, the path's text equals the template's rendering of the whole conversation."""
    tree, node = r.start(chat[:1])
    for i in range(1, len(chat), 2):
        node = sample(r, tree, node, chat[i]["content"])
        if i + 1 < len(chat):
            node = r.extend_turn(tree, node, chat[i + 1 : i + 2])
    want = r.encode(r.render(chat[:-1], add_generation_prompt=True)) + r.encode(chat[-1]["content"]) + [r.end_id]
    assert tree.path_ids(node) == want
    assert r.display(tree, node) == chat
    return tree


FOUR = [user("one"), assistant("two"), user("three"), assistant("four"), user("five"), assistant("six")]
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
TRIMMED = CHATML.replace("m['content']", "m['content'] | trim")
GEMMA = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + m['content'] | trim"
    " + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"
)


@pytest.mark.parametrize("template", [CHATML, None, TRIMMED, GEMMA])
def test_three_turns_equal_the_whole_rendering(template):
    tree = check_turns(chatml(template), FOUR)
    assert not any(m.get("rerendered") for m in tree.meta)


def test_default_system_prompt_stands_once():
    smol = (
        "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are SmolLM<|im_end|>\n' }}{% endif %}"
        "{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tree = check_turns(chatml(smol), FOUR)
    assert chatml(smol).tokenizer.decode(tree.ids).count("You are SmolLM") == 1


def test_text_between_answer_and_end_token():
    r = ChatRenderer(char_tokenizer(PRINTED), template=LLAMA2)
    tree, node = r.start([user("hi")])
    node = sample(r, tree, node, " ok ")
    node = r.extend_turn(tree, node, "more")
    assert r.tokenizer.decode(tree.path_ids(node)) == "[INST] hi [/INST] ok <eos>[INST] more [/INST]"
    # Cut short after its last space: that space is not written twice.
    tree, node = r.start([user("hi")])
    node = r.extend_turn(tree, sample(r, tree, node, " ok ", end=False), "more")
    assert r.tokenizer.decode(tree.path_ids(node)) == "[INST] hi [/INST] ok <eos>[INST] more [/INST]"
    trained = sft_tree(r, {"messages": [user("hi"), assistant("ok"), user("more"), assistant("no")]})
    assert r.tokenizer.decode(trained.ids) == "[INST] hi [/INST] ok <eos>[INST] more [/INST] no <eos>"
    assert r.tokenizer.decode(targets(trained)) == " ok <eos> no <eos>"


def test_an_end_token_that_swallows_the_newline_behind_it():
    tok = char_tokenizer(PRINTED)
    tok.add_special_tokens({"additional_special_tokens": [AddedToken(m, special=True, rstrip=True) for m in MARKS]})
    r = ChatRenderer(tok, template=CHATML)
    full = r.encode(r.render([*FOUR[:3]], add_generation_prompt=True))
    tree, node = r.start(FOUR[:1])
    node = r.extend_turn(tree, sample(r, tree, node, "two"), "three")
    assert tree.path_ids(node) == full


def test_a_cut_answer_gets_the_end_of_turn_as_context():
    r = chatml()
    tree, node = r.start([user("hi")])
    answer = sample(r, tree, node, "unfin", end=False)
    later = r.extend_turn(tree, answer, [user("go on")], kind=Kind.OBSERVATION)
    assert tree.node_ids(later)[0] == r.end_id
    assert not tree.sampled[later] and tree.weight[tree.span(later)].sum() == 0
    assert np.isnan(tree.logprob[tree.span(later)]).all()
    assert tree.kind[later] == Kind.OBSERVATION
    assert r.tokenizer.decode(tree.path_ids(later)).endswith(
        "unfin<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    )


def test_kind_of_the_next_turn():
    r = chatml()
    tree, node = r.start([user("hi")])
    answer = sample(r, tree, node, "x")
    tool, again = r.extend_turn(tree, answer, [{"role": "tool", "content": "7"}]), r.extend_turn(tree, answer, "again")
    assert (tree.kind[tool], tree.kind[again]) == (Kind.TOOL, Kind.USER)
    assert len(tree.children(answer)) == 2


def test_a_raw_text_root_takes_turns_too():
    r = chatml()
    tree, node = r.start("once upon")
    node = r.extend_turn(tree, sample(r, tree, node, " a time", end=False), "and then?")
    assert r.tokenizer.decode(tree.path_ids(node)) == (
        "once upon a time<|im_end|>\n<|im_start|>user\nand then?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_turns_that_cannot_follow():
    r = chatml(GEMMA)
    tree, node = r.start([user("hi")])
    with pytest.raises(DataError, match="node 0 does not end in an assistant turn"):
        r.extend_turn(tree, node, "more")
    answer = sample(r, tree, node, "x")
    with pytest.raises(DataError, match="no messages"):
        r.extend_turn(tree, answer, [])
    n = tree.n_nodes
    with pytest.raises(DataError, match="roles must alternate"):
        r.extend_turn(tree, answer, [user("a"), user("b")])
    assert tree.n_nodes == n


# Drops the reasoning of earlier turns, as reasoning models' templates do.
THINKING = (
    "{% for m in messages %}{% set text = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Writes the system text into the last user turn, as Mistral's templates do.
MOVING = (
    "{% set ns = namespace(s='') %}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{% set ns.s = m['content'] + ' ' %}"
    "{% elif m['role'] == 'user' %}[INST] {{ ns.s if loop.last else '' }}{{ m['content'] }} [/INST]"
    "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
)


def test_a_template_that_drops_reasoning_starts_a_new_branch(caplog):
    r = chatml(THINKING)
    tree, node = r.start([user("q")])
    answer = sample(r, tree, node, "<think>hm</think>12")
    before = tree.path_ids(answer)
    with caplog.at_level(logging.WARNING):
        later = r.extend_turn(tree, answer, "sure?")
        r.extend_turn(tree, answer, "really?")
    assert sum("rewrites earlier turns" in m for m in caplog.messages) == 1
    assert tree.parent[later] == 0 and tree.meta[later]["rerendered"] is True
    whole = [user("q"), assistant("<think>hm</think>12"), user("sure?")]
    assert tree.path_ids(later) == r.prompt_ids(whole)
    assert "think" not in r.tokenizer.decode(tree.path_ids(later))
    assert r.display(tree, later) == whole  # people still see it
    assert tree.path_ids(answer) == before
    # The next turn goes on from there: the last answer is dropped again, the prompt before it is shared.
    second = sample(r, tree, later, "<think>yes</think>yes")
    third = r.extend_turn(tree, second, "thanks")
    assert tree.parent[third] == later
    assert tree.path_ids(third) == r.prompt_ids([*whole, assistant("<think>yes</think>yes"), user("thanks")])
    # An answer without reasoning stays a prefix.
    plain = sample(r, tree, later, "yes")
    fourth = r.extend_turn(tree, plain, "ok")
    assert tree.parent[fourth] == plain
    json.dumps(tree.meta, allow_nan=False)


def test_such_a_template_trains_every_turn_on_the_prompt_that_it_would_see():
    r = chatml(THINKING)
    chat = [
        user("q"),
        assistant("<think>a</think>1"),
        user("r"),
        assistant("<think>b</think>2"),
        user("s"),
        assistant("3"),
    ]
    tree = sft_tree(r, {"messages": chat})
    assert len(tree.leaves()) == 3
    for leaf, last in zip(tree.leaves(), (1, 3, 5), strict=True):
        prompt = r.prompt_ids(chat[:last])
        answer = [*r.encode(chat[last]["content"]), r.end_id]
        assert tree.path_ids(leaf) == prompt + answer
        assert tree.ids[tree.span(leaf)][tree.weight[tree.span(leaf)] > 0].tolist() == answer
    assert int(tree.weight.sum()) == sum(len(r.encode(chat[i]["content"])) + 1 for i in (1, 3, 5))
    cut = sft_tree(r, {"messages": chat}, max_length=40, keep="end")
    assert all(
        cut.path_length(leaf) == min(40, tree.path_length(old))
        for leaf, old in zip(cut.leaves(), tree.leaves(), strict=True)
    )
    assert cut.weight.max() == 1


def test_a_template_that_moves_the_system_text():
    r = ChatRenderer(char_tokenizer(PRINTED), template=MOVING)
    tree, node = r.start([system("short"), user("a")], task="t", seed=9)
    assert node == 1 and tree.length[0] == 0 and (tree.task, tree.seed) == ("t", 9)
    assert r.tokenizer.decode(tree.path_ids(node)) == "[INST] short a [/INST]"
    later = r.extend_turn(tree, sample(r, tree, node, "b"), "c")
    assert tree.parent[later] == 0
    assert r.tokenizer.decode(tree.path_ids(later)) == "[INST] a [/INST]b<eos>[INST] short c [/INST]"
    third = r.extend_turn(tree, sample(r, tree, later, "d"), "e")
    assert (
        r.tokenizer.decode(tree.path_ids(third)) == "[INST] a [/INST]b<eos>[INST] c [/INST]d<eos>[INST] short e [/INST]"
    )
    # Without a system text nothing moves.
    tree, node = r.start([user("a")])
    later = r.extend_turn(tree, sample(r, tree, node, "b"), "c")
    assert node == 0 and tree.parent[later] == 1
    # A filled root cannot hold it: said, not guessed.
    tree = TokenTree(r.prompt_ids([system("short"), user("a")]), meta={"messages": [system("short"), user("a")]})
    answer = sample(r, tree, 0, "b")
    with pytest.raises(ModelError, match=r"begin the tree with renderer.start\(messages\)"):
        r.extend_turn(tree, answer, "c")
    # Training follows suit.
    trained = sft_tree(r, {"messages": [system("short"), user("a"), assistant("b"), user("c"), assistant("d")]})
    assert [r.tokenizer.decode(trained.path_ids(n)) for n in trained.leaves()] == [
        "[INST] short a [/INST]b<eos>",
        "[INST] a [/INST]b<eos>[INST] short c [/INST]d<eos>",
    ]


# -- records ---------------------------------------------------------------------------------------------------------


def test_text_records():
    r = ChatRenderer(char_tokenizer(LETTERS, add_bos=True))
    tree = sft_tree(r, {"text": "ab"})
    assert tree.ids.tolist() == [1, *r.encode("ab"), 2] and targets(tree) == [*r.encode("ab"), 2]
    no_bos = ChatRenderer(char_tokenizer(LETTERS))
    tree = sft_tree(no_bos, {"text": "ab<eos>"}, task="t7")
    assert tree.ids.tolist() == [*no_bos.encode("ab"), 2] and targets(tree) == [*no_bos.encode("b"), 2]
    assert tree.task == "t7"


def test_preference_trees_share_the_prompt():
    r = chatml()
    good, bad = [user("q"), assistant("yes")], [user("q"), assistant("no")]
    for record in (
        {"prompt": good[:1], "chosen": good[1:], "rejected": bad[1:]},
        {"chosen": good, "rejected": bad},
    ):
        tree = preference_tree(r, record)
        assert tree.node_ids(0) == r.prompt_ids([user("q")])
        chosen, rejected = tree.children(0)
        assert [tree.meta[n]["label"] for n in (chosen, rejected)] == ["chosen", "rejected"]
        assert tree.path_ids(chosen) == sft_tree(r, {"messages": good}).ids.tolist()
        assert tree.path_ids(rejected) == sft_tree(r, {"messages": bad}).ids.tolist()
        assert tree.weight[tree.span(chosen)].min() == 1 and tree.weight[tree.span(0)].max() == 0
    # Equal answers stay two leaves.
    same = preference_tree(r, {"prompt": "a", "chosen": "b", "rejected": "b"})
    assert len(same.leaves()) == 2 and same.weight.sum() == 4


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"question": "x", "answer": "y"},
            "needs messages, prompt and completion, or text; its columns are: 'question', 'answer'",
        ),
        ({"prompt": "x"}, "its columns are: 'prompt'"),
        ({"text": 5}, "column 'text': expected text, got int"),
        ({"messages": "x"}, "column 'messages': expected a list of messages, got 'x'"),
        ({"messages": []}, "column 'messages': expected a list"),
        ({"messages": [{"role": "user"}]}, r"column 'messages': messages\[0\].content is None: give text"),
        ({"messages": [{"content": "x"}]}, r"messages\[0\].role is None"),
        ({"messages": ["x"]}, r"messages\[0\]: expected an object with role and content, got str"),
        ({"prompt": "x", "completion": [assistant("y")]}, "columns 'prompt' and 'completion': give both as text"),
        ({"prompt": "", "completion": "y"}, "the prompt is empty"),
        ({"text": ""}, "the prompt is empty"),
        ({"prompt": "x", "completion": "ÿ"}, "the tokenizer cannot encode"),
    ],
)
def test_bad_records(record, message):
    with pytest.raises(DataError, match=message):
        sft_tree(chatml(), record)
    with pytest.raises(DataError, match="record 1: "):
        sft_trees(chatml(), [{"text": "ok"}, record])


def test_bad_preference_records():
    with pytest.raises(DataError, match="needs chosen and rejected; its columns are: 'prompt', 'chosen'"):
        preference_tree(chatml(), {"prompt": "a", "chosen": "b"})
    with pytest.raises(DataError, match="column 'rejected'"):
        preference_tree(chatml(), {"chosen": [user("q"), assistant("a")], "rejected": [user("q")]})


def test_as_messages():
    assert as_messages("hi") == [user("hi")]
    given = [user("hi")]
    assert as_messages(given) == given and as_messages(given)[0] is not given[0]
    with pytest.raises(DataError, match="expected text or a list"):
        as_messages(5)


def test_display_of_other_trees():
    r = ChatRenderer(byte_tokenizer())
    tree = TokenTree(r.encode("é?"))
    thought = tree.add(0, r.encode("hm "), kind=Kind.THOUGHT, sampled=True)
    said = tree.add(thought, [*r.encode("yes"), r.end_id], sampled=True)
    seen = tree.add(said, r.encode("door opens"), kind=Kind.OBSERVATION)
    tool = tree.add(seen, r.encode("7"), kind=Kind.TOOL)
    assert r.display(tree, tool) == [
        user("é?"),
        assistant("hm yes"),
        user("door opens"),
        {"role": "tool", "content": "7"},
    ]
