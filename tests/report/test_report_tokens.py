"""Token ids to the text of each token."""

import pytest
from fakeruns import tokenizer, write_run
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from forethought.report.tokens import find_tokenizer, from_decode, from_token, ids_only, load_pieces

TOK = tokenizer()


def decode(ids):
    return TOK.decode(ids, skip_special_tokens=False)


PIECES = from_decode(decode)


def test_a_character_of_several_tokens_stands_on_its_last():
    ids = TOK.encode("x😀y").ids
    assert len(ids) == 6  # four bytes for the face
    assert PIECES(ids) == ["x", "", "", "", "😀", "y"]


def test_a_character_cut_by_the_length_limit_is_shown_as_broken():
    ids = TOK.encode("x😀").ids[:-1]
    assert PIECES(ids) == ["x", "\ufffd", "", ""]


@given(st.text(st.characters(codec="utf-8"), max_size=30))
def test_pieces_join_to_the_text(text):
    ids = TOK.encode(text).ids
    out = PIECES(ids)
    assert len(out) == len(ids)
    assert "".join(out) == decode(ids)


def test_special_tokens_are_shown():
    ids = [*TOK.encode("12").ids, TOK.token_to_id("<|im_end|>")]
    assert PIECES(ids)[-1] == "<|im_end|>"


def test_words_of_a_sentencepiece_like_tokenizer_keep_their_space():
    tok = Tokenizer(models.WordLevel({"▁the": 0, "▁cat": 1, "s": 2, "<unk>": 3}, unk_token="<unk>"))
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    assert from_decode(tok.decode)([0, 1, 2, 1]) == ["the", " cat", "s", " cat"]


def test_functions_of_one_id_and_ids():
    assert from_token(lambda i: f"<{i}>")([3, 4]) == ["<3>", "<4>"]
    assert ids_only([3, 44]) == ["3 ", "44 "]


def test_the_tokenizer_of_a_run_folder(tmp_path):
    assert find_tokenizer(tmp_path) is None
    for step in (2, 10):
        (tmp_path / f"checkpoints/step_{step:08d}").mkdir(parents=True)
        write_run(tmp_path / f"checkpoints/step_{step:08d}", tok=TOK)
    assert find_tokenizer(tmp_path) == tmp_path / "checkpoints/step_00000010/tokenizer.json"
    write_run(tmp_path / "checkpoints/final", tok=TOK)
    assert find_tokenizer(tmp_path) == tmp_path / "checkpoints/final/tokenizer.json"
    write_run(tmp_path, tok=TOK)
    assert find_tokenizer(tmp_path) == tmp_path / "tokenizer.json"
    assert load_pieces(tmp_path / "tokenizer.json")(TOK.encode("12 + 7").ids) == PIECES(TOK.encode("12 + 7").ids)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError):
        load_pieces(tmp_path / "tokenizer.json")


def test_a_lower_casing_tokenizer_is_decoded_as_it_is():
    tok = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tok.normalizer = normalizers.Lowercase()
    assert from_decode(tok.decode)([0, 1, 1]) == ["a", " b", " b"]
