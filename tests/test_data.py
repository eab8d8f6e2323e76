"""Data files: strict JSON both ways, tasks by column, and a batch order that can be resumed."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.data import BatchSampler, column, load_tasks, read_jsonl, read_rows, write_jsonl
from forethought.errors import ConfigError, DataError, MissingExtraError, RunError
from forethought.files import finite, from_json, nonfinite, to_json

SHARED = Path(__file__).parents[1] / "../shared/data/math"
real_data = pytest.mark.skipif(not SHARED.is_dir(), reason=f"no shared data at {SHARED}")


def file_of(tmp_path: Path, content: bytes | str, name: str = "data.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def refused(call, *args, **kwargs) -> str:
    with pytest.raises(DataError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


# -- strict JSON (case H30) ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), np.float64("inf")])
def test_h30_writer_refuses_what_is_not_json_and_leaves_the_file(tmp_path, value):
    path = file_of(tmp_path, '{"old": 1}\n')
    rows = [{"reward": 0.5}, {"reward": 0.5, "parts": {"format": [1.0, value]}}, {"reward": 1}]
    message = refused(write_jsonl, path, rows)
    assert message.startswith(f"{path}: row 1: parts.format[1]: NaN or infinite") and "nothing was written" in message
    assert path.read_text() == '{"old": 1}\n' and os.listdir(tmp_path) == ["data.jsonl"]


def test_h30_three_rewards(tmp_path):
    path = tmp_path / "rewards.jsonl"
    assert "row 1: reward: NaN" in refused(write_jsonl, path, [{"reward": r} for r in (0.5, math.nan, math.inf)])
    assert not path.exists()


def test_h30_reader_counts_and_names_the_cut_row_and_skips_only_when_told(tmp_path):
    path = file_of(tmp_path, b'\xef\xbb\xbf{"a": 1}\r\n{"a": 2}\r\n{"a": 3}\r\n{"a": "cu\r\n\r\n')
    message = refused(read_jsonl, path)
    assert message.startswith(f"{path}: 3 rows loaded, 1 refused\n  line 4: column 7: not JSON (")
    assert "skip_bad" in message
    with pytest.warns(UserWarning, match=r"3 rows loaded, 1 refused\n  line 4: column 7"):
        assert read_jsonl(path, skip_bad=True) == [{"a": 1}, {"a": 2}, {"a": 3}]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"a": NaN}', "line 2: field 'a': NaN is not JSON"),
        ('{"a": {"b": [1, -Infinity]}}', "line 2: field 'a.b[1]': -Infinity is not JSON"),
        ('{"a": 1e999}', "line 2: field 'a': the number 1e999 is too large"),
        ('{"a": 1, "a": 2}', "line 2: the field 'a' is given twice"),
        ('{"x": {"a": 1, "a": 2}}', "line 2: the field 'a' is given twice"),
        ("{'a': 1}", "line 2: column 2: not JSON"),
        ('{"a": 1,}', "line 2: column 9: not JSON"),
        ('{"a": 1} {"a": 2}', "line 2: column 10: not JSON (Extra data)"),
        ("[1, 2]", "line 2: list, not an object"),
        ("3", "line 2: int, not an object"),
        ("null", "line 2: NoneType, not an object"),
        ('{"a": "\\ud800"}', "line 2: holds half of a surrogate pair"),
        ("[" * 100_000, "line 2: nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "line 2: Exceeds the limit"),
        (b'{"a": "\xff"}', "line 2: column 8: not UTF-8"),
        ("\x00\x00", "line 2: column 1: not JSON"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, problem):
    raw = line if isinstance(line, bytes) else line.encode()
    path = file_of(tmp_path, b'{"a": 0}\n' + raw + b"\n")
    message = refused(read_jsonl, path)
    assert problem in message and "1 rows loaded, 1 refused" in message


def test_many_bad_lines_are_counted_and_five_shown(tmp_path):
    message = refused(read_jsonl, file_of(tmp_path, '{"a": 1}\n' + "x\n" * 8))
    assert "1 rows loaded, 8 refused" in message and "line 6:" in message and "line 7:" not in message
    assert "... and 3 more" in message


def test_a_json_list_and_utf16_get_a_hint(tmp_path):
    message = refused(read_jsonl, file_of(tmp_path, '[\n {"a": 1},\n {"a": 2}\n]\n'))
    assert "line 1" in message and "looks like one JSON list: write one object per line" in message
    assert "looks like one JSON list" in refused(read_jsonl, file_of(tmp_path, '[{"a": 1}, {"a": 2}]'))
    assert "is UTF-16 text; save it as UTF-8" in refused(read_jsonl, file_of(tmp_path, '{"a": 1}'.encode("utf-16")))


def test_only_a_newline_ends_a_line(tmp_path):
    text = "a\u2028b\u0085c\x0bd\u2029"
    path = file_of(tmp_path, '{"t": "' + text.replace("\x0b", "\\u000b") + '"}\n\n{"t": "\\ud83d\\ude00"}')
    assert read_jsonl(path) == [{"t": text}, {"t": "😀"}]


def test_files_that_are_not_there(tmp_path):
    file_of(tmp_path, "{}", "train.jsonl")
    assert "trian.jsonl: no such data file; did you mean 'train.jsonl'?" in refused(
        read_jsonl, tmp_path / "trian.jsonl"
    )
    assert refused(read_jsonl, tmp_path / "no" / "x.jsonl").endswith("x.jsonl: no such data file")
    assert "is a folder; give a .jsonl or .parquet file" in refused(read_jsonl, tmp_path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(rows=st.lists(st.dictionaries(st.text(), json_values, max_size=3), max_size=4))
def test_rows_survive_writing_and_reading(rows, tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "r.jsonl"
    assert write_jsonl(path, rows) == len(rows)
    assert read_jsonl(path) == rows
    assert [json.loads(line) for line in path.read_text().split("\n")[:-1]] == rows


def test_numpy_tensors_and_other_mappings_become_plain_json(tmp_path):
    import torch

    path = tmp_path / "r.jsonl"
    row = {"a": np.float32(0.5), "b": np.int64(3), "c": np.arange(3), "d": torch.tensor(2.0), "e": np.bool_(True)}
    write_jsonl(path, [types.MappingProxyType(row)])
    assert path.read_text() == '{"a": 0.5, "b": 3, "c": [0, 1, 2], "d": 2.0, "e": true}\n'


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"ok": 1, "bad": {1, 2}}, "row 0: field 'bad': set is not JSON"),
        ({"bad": b"x"}, "row 0: field 'bad': bytes is not JSON"),
        ({"bad": "\ud800"}, "row 0: field 'bad': holds half of a surrogate pair"),
        ({"x": {(1, 2): 3}}, "row 0: field 'x': keys must be"),
        ({"x": np.array([1.0, math.nan])}, "row 0: x[1]: NaN or infinite"),
    ],
)
def test_rows_that_are_not_json_are_named(tmp_path, row, message):
    assert message in refused(write_jsonl, tmp_path / "r.jsonl", [row])
    assert os.listdir(tmp_path) == []


def test_finite_and_nonfinite_agree():
    value = {"a": [1.0, math.nan], "b": {"c": -math.inf, "d": "NaN"}, "e": np.float32("inf"), "f": (0.0,)}
    assert nonfinite(value) == ["a[1]", "b.c", "e"]
    assert finite(value) == {"a": [1.0, None], "b": {"c": None, "d": "NaN"}, "e": None, "f": [0.0]}
    assert from_json(to_json(finite(value))) == finite(value)


# -- rows and columns ------------------------------------------------------------------------------------------------


def test_required_columns_are_named_with_the_nearest(tmp_path):
    path = file_of(tmp_path, '{"prompt": "a", "m": {"truth": 1}}\n{"promt": "b"}\n{"prompt": null}\n{}\n')
    message = refused(read_jsonl, path, required=("prompt",))
    assert "1 rows loaded, 3 refused" in message
    assert "line 2: no column 'prompt'; did you mean 'promt'? (columns: promt)" in message
    assert "line 3: column 'prompt' is null" in message
    assert "line 4: no column 'prompt' (columns: none)" in message
    assert "line 1: no column 'm.trut'; did you mean 'm.truth'?" in refused(read_jsonl, path, required=("m.trut",))
    with pytest.warns(UserWarning, match="1 rows loaded, 3 refused"):
        assert len(read_jsonl(path, required=("m.truth",), skip_bad=True)) == 1


def test_a_column_of_the_very_name_comes_before_the_nested_one():
    assert column({"a.b": 1, "a": {"b": 2}}, "a.b") == 1
    assert column({"a": {"b": {"c": 3}}}, "a.b.c") == 3
    with pytest.raises(KeyError):
        column({"a": 1}, "a.b")


def test_empty_data_is_refused_where_rows_are_needed(tmp_path):
    path = file_of(tmp_path, b"\n\r\n")
    assert read_jsonl(path) == []
    assert refused(read_rows, path).endswith("has no rows that can be used; give at least one")
    assert "has no rows" in refused(load_tasks, path)
    assert "limit=0: give at least 1" in refused(load_tasks, path, limit=0)


def test_limit_stops_before_later_lines(tmp_path):
    path = file_of(tmp_path, '{"prompt": "a"}\n{"prompt": "b"}\nbroken\n')
    assert [task["prompt"] for task in load_tasks(path, limit=2)] == ["a", "b"]
    assert "line 3" in refused(load_tasks, path, limit=3)


# -- tasks -----------------------------------------------------------------------------------------------------------


def tasks_of(tmp_path, *rows, **kwargs):
    path = tmp_path / "t.jsonl"
    write_jsonl(path, rows)
    return load_tasks(path, **kwargs)


def test_prompt_answer_and_all_other_columns(tmp_path):
    rows = [{"prompt": "1+1", "answer": 2, "level": "easy"}, {"prompt": "2+2", "answer": 4, "level": None}]
    assert tasks_of(tmp_path, *rows) == [
        {"id": "0", "prompt": "1+1", "answer": 2, "level": "easy"},
        {"id": "1", "prompt": "2+2", "answer": 4, "level": None},
    ]


def test_named_nested_and_joined_columns(tmp_path):
    row = {
        "Body": "Two apples.",
        "Question": "How many?",
        "reward_model": {"ground_truth": "2"},
        "id": 7,
        "answer": "x",
    }
    (task,) = tasks_of(tmp_path, row, prompt_column="{Body} {Question}", answer_column="reward_model.ground_truth")
    assert (task["id"], task["prompt"], task["answer"]) == ("7", "Two apples. How many?", "2")
    assert task["Body"] == "Two apples."
    (task,) = tasks_of(
        tmp_path, row, prompt_column="Question", answer_column="Body", id_column="reward_model.ground_truth"
    )
    assert (task["id"], task["prompt"], task["answer"]) == ("2", "How many?", "Two apples.")


def test_trl_messages_are_split_before_the_last_assistant_turn(tmp_path):
    user, assistant = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
    first, second = tasks_of(tmp_path, {"messages": [user, assistant, user, assistant]}, {"messages": [user]})
    assert first["prompt"] == [user, assistant, user] and first["completion"] == [assistant]
    assert first["messages"] == [user, assistant, user, assistant]
    assert second["prompt"] == [user] and "completion" not in second
    assert tasks_of(tmp_path, {"messages": [user, assistant]}, prompt_column="messages")[0]["prompt"] == [user]


def test_trl_prompt_completion_and_prompt_with_extra_columns(tmp_path):
    (task,) = tasks_of(tmp_path, {"prompt": "q", "completion": "c", "solution": 3})
    assert task == {"id": "0", "prompt": "q", "completion": "c", "solution": 3}
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "q"}]}]
    assert tasks_of(tmp_path, {"prompt": chat})[0]["prompt"] == chat


def test_an_answer_that_some_rows_lack_or_that_was_named_is_needed(tmp_path):
    assert "line 2: no column 'answer'" in refused(tasks_of, tmp_path, {"prompt": "a", "answer": 1}, {"prompt": "b"})
    assert "line 2: column 'answer' is null" in refused(
        tasks_of, tmp_path, {"prompt": "a", "answer": 1}, {"prompt": "b", "answer": None}
    )
    assert "line 1: no column 'target'" in refused(tasks_of, tmp_path, {"prompt": "a"}, answer_column="target")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"question": "q"}, "no column 'prompt' (columns: question)"),
        ({"prompt": "  "}, "column 'prompt' is empty"),
        ({"prompt": 3}, "column 'prompt' is neither text nor a list of chat messages"),
        ({"prompt": []}, "column 'prompt' is neither text nor a list of chat messages"),
        ({"prompt": ["hi"]}, "column 'prompt' message 0 has no 'role'"),
        ({"prompt": [{"role": "user"}]}, "column 'prompt' message 0 has no 'content'"),
        (
            {"messages": [{"role": "assistant", "content": "a"}]},
            "column 'messages' has nothing before the assistant's turn",
        ),
        ({"messages": None}, "column 'messages' is null"),
        ({"prompt": "a", "id": None}, "column 'id' is null"),
    ],
)
def test_unusable_prompts_are_named_by_line(tmp_path, row, problem):
    good = {"prompt": "fine", "messages": [{"role": "user", "content": "u"}], **({"id": 1} if "id" in row else {})}
    assert f"line 2: {problem}" in refused(tasks_of, tmp_path, good, row)


def test_ids_must_differ_and_do_not_move_when_bad_rows_are_left_out(tmp_path):
    path = file_of(tmp_path, '{"prompt": "a"}\n\nbroken\n{"prompt": "b"}\n')
    with pytest.warns(UserWarning, match="line 3"):
        assert [task["id"] for task in load_tasks(path, skip_bad=True)] == ["0", "2"]
    message = refused(tasks_of, tmp_path, {"prompt": "a", "id": 1}, {"prompt": "b", "id": "1"})
    assert "line 2: the id '1' is already that of line 1" in message and "id_column=None numbers the rows" in message
    rows = [{"prompt": "a", "id": 1}, {"prompt": "b", "id": 1}]
    assert [t["id"] for t in tasks_of(tmp_path, *rows, id_column=None)] == ["0", "1"]


def test_skipping_every_row_is_an_error(tmp_path):
    with pytest.warns(UserWarning, match="0 rows loaded, 1 refused"):
        assert "none of its 1 rows can be used" in refused(tasks_of, tmp_path, {"q": 1}, skip_bad=True)


# -- parquet ---------------------------------------------------------------------------------------------------------


def test_parquet_rows_nested_columns_and_problems(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    rows = [{"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": "3"}}, {"prompt": None}]
    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    (task,) = load_tasks(path, answer_column="reward_model.ground_truth", limit=1)
    assert task["prompt"] == [{"role": "user", "content": "q"}] and task["answer"] == "3" and task["id"] == "0"
    assert "1 rows loaded, 1 refused\n  row 2: column 'prompt' is null" in refused(load_tasks, path)
    path.write_bytes(path.read_bytes()[:-30])
    assert f"{path}: not a readable parquet file" in refused(load_tasks, path)
    assert "no such data file; did you mean 't.parquet'?" in refused(load_tasks, tmp_path / "tt.parquet")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'forethought\[parquet\]'"):
        load_tasks(tmp_path / "t.parquet")


@real_data
def test_real_files_by_named_columns():
    pool = load_tasks(SHARED / "mawps_singleop.jsonl", "input", "target")
    assert len(pool) == 562
    assert pool[0]["answer"] == 14.0 and pool[0]["id"] == "0"
    svamp = load_tasks(SHARED / "svamp_test.jsonl", "{Body} {Question}", "Answer", id_column="ID")
    assert len(svamp) == 1000 and svamp[0]["id"] == "chal-777" and svamp[0]["prompt"].endswith("group of bananas?")
    assert len(load_tasks(SHARED / "gsm8k_test.jsonl", "question")) == 1319
    assert load_tasks(SHARED / "aime24.jsonl", "problem")[0]["id"] == "60"
    pytest.importorskip("pyarrow")
    dsr = load_tasks(SHARED / "dsr_sub.parquet", answer_column="reward_model.ground_truth")
    assert len(dsr) == 1209 and dsr[0]["answer"] == "\\frac{3}{7}" and dsr[0]["prompt"][0]["role"] == "user"


# -- batches (cases H13, H33) ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False])
def test_h33_every_epoch_ends_with_its_short_batch_and_then_it_is_over(shuffle):
    sampler = BatchSampler(10, 4, seed=0, shuffle=shuffle, epochs=2)
    batches = list(sampler)
    assert [len(b) for b in batches] == [4, 4, 2, 4, 4, 2] and len(sampler) == 6
    assert sorted(sum(batches[:3], [])) == sorted(sum(batches[3:], [])) == list(range(10))
    assert list(sampler) == [] and next(iter(sampler), None) is None  # used up is not fresh


def test_h33_a_batch_larger_than_the_data_is_the_whole_data_once():
    assert [sorted(b) for b in BatchSampler(10, 16, seed=0, epochs=2)] == [list(range(10))] * 2


def test_without_epochs_there_is_no_end_and_each_epoch_has_its_own_order():
    sampler = BatchSampler(6, 3, seed=1)
    epochs = [next(sampler) + next(sampler) for _ in range(50)]
    assert all(sorted(e) == list(range(6)) for e in epochs) and len({tuple(e) for e in epochs}) > 25
    assert sampler.epoch == 50
    with pytest.raises(TypeError, match="no length"):
        len(sampler)


def test_the_order_is_that_of_the_seed_alone():
    # Fixed values: the order of a saved run must not move with a release of NumPy or of this package.
    assert BatchSampler(10, 10, seed=7).order(3) == [3, 8, 4, 2, 0, 9, 1, 5, 6, 7]
    assert BatchSampler(10, 2, seed=0).order(0) != BatchSampler(10, 2, seed=1).order(0)
    assert BatchSampler(4, 2, seed=0, shuffle=False, epochs=1).order(0) == [0, 1, 2, 3]
    counts = np.zeros((4, 4), int)  # item x place over many epochs: no place is preferred
    sampler = BatchSampler(4, 4, seed=0)
    for epoch in range(4000):
        counts[np.arange(4), np.argsort(sampler.order(epoch))] += 1
    assert counts.min() > 880 and counts.max() < 1120


def test_h13_resume_in_mid_epoch_in_a_new_process(tmp_path):
    unbroken = list(BatchSampler(10, 2, seed=3, epochs=2))
    first = BatchSampler(10, 2, seed=3, epochs=2)
    seen = [next(first) for _ in range(7)]
    (tmp_path / "state.json").write_text(json.dumps(first.state_dict()))
    program = (
        "import json, random, sys, numpy as np; from forethought.data import BatchSampler\n"
        "random.seed(5); np.random.seed(6)\n"  # a random state that has moved on changes nothing
        "s = BatchSampler(10, 2, seed=3, epochs=2); s.load_state_dict(json.load(open(sys.argv[1])))\n"
        "print(json.dumps(list(s)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "state.json")], capture_output=True, text=True, check=True
    )
    rest = json.loads(done.stdout)
    assert len(rest) == 3 and seen + rest == unbroken
    assert sorted(sum(seen + rest, [])) == sorted(list(range(10)) * 2)


@settings(deadline=None)
@given(
    n=st.integers(1, 20),
    batch=st.integers(1, 25),
    epochs=st.integers(0, 4),
    stop=st.integers(0, 90),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
)
def test_resume_at_any_batch_equals_the_unbroken_run(n, batch, epochs, stop, seed, shuffle):
    unbroken = list(BatchSampler(n, batch, seed, shuffle, epochs))
    assert sorted(sum(unbroken, [])) == sorted(list(range(n)) * epochs)
    first = BatchSampler(n, batch, seed, shuffle, epochs)
    head = [b for _, b in zip(range(stop), first, strict=False)]
    second = BatchSampler(n, batch, seed, shuffle, epochs)
    second.load_state_dict(json.loads(json.dumps({**first.state_dict(), "step": len(head)})))
    assert head + list(second) == unbroken


def test_a_sampler_with_other_data_refuses_the_state_and_says_what_changed():
    state = BatchSampler(10, 2, seed=3).state_dict()
    with pytest.raises(RunError, match="these have changed: n: 10 -> 12, batch_size: 2 -> 4"):
        BatchSampler(12, 4, seed=3).load_state_dict(state)
    longer = BatchSampler(10, 2, seed=3, epochs=9)
    longer.load_state_dict(state)
    assert longer.step == 0
    with pytest.raises(RunError, match="seed: None -> 3"):
        BatchSampler(10, 2, seed=3).load_state_dict({"step": 1, "n": 10, "batch_size": 2, "shuffle": True})


def test_bad_sampler_arguments_come_together():
    with pytest.raises(ConfigError, match="n=0: there is no data.*batch_size=0: give at least 1.*epochs=-1"):
        BatchSampler(0, 0, seed=0, epochs=-1)
