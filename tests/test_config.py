"""Settings: reading by type, all problems in one error, YAML's traps, overrides, differences, seeds."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.config import (
    ABSENT,
    apply_overrides,
    derive_seed,
    diff,
    dump_yaml,
    from_dict,
    load_yaml,
    parse_yaml,
    render_diff,
    to_dict,
)
from forethought.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Optim:
    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)
    warmup: int = 0

    def __post_init__(self):
        if self.lr <= 0:
            raise ConfigError(f"optim: lr={self.lr}: give a positive number")


@dataclass(frozen=True, kw_only=True)
class Lora:
    r: int = 8
    targets: tuple[str, ...] = ("q_proj", "v_proj")


@dataclass(frozen=True, kw_only=True)
class Job:
    model: str
    max_steps: int = 10
    epochs: int = 1
    learning_rate: float = 1e-3
    total_tokens: int = 1000
    shuffle: bool = True
    loss: Literal["grpo", "dapo", "dr_grpo"] = "grpo"
    precision: Literal["fp32", "bf16"] | None = None
    clip: float | Literal["off"] = 0.2
    stop: tuple[str, ...] = ()
    seeds: list[int] = field(default_factory=lambda: [0])
    data: Path | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    tag: str | int = ""
    optim: Optim = Optim()
    lora: Lora | None = None


def build(**values) -> Job:
    return from_dict(Job, {"model": "m", **values})


def problems(**values) -> str:
    with pytest.raises(ConfigError) as caught:
        build(**values)
    return str(caught.value)


def yaml_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return path


# -- case H29 --------------------------------------------------------------------------------------------------------


def test_h29_numbers_without_dot_or_sign_are_numbers_and_the_rest_is_one_message(tmp_path):
    path = yaml_file(tmp_path, "model: m\nlearning_rate: 5e-5\ntotal_tokens: 1.0e6\nmax_stpes: 10\nepochs: yes\n")
    with pytest.raises(ConfigError) as caught:
        from_dict(Job, load_yaml(path), source=str(path))
    message = str(caught.value)
    assert message.startswith(f"{path}: 2 problems\n")
    assert "max_stpes: unknown setting; did you mean 'max_steps'?" in message
    assert "epochs='yes': give a whole number" in message
    good = from_dict(Job, load_yaml(yaml_file(tmp_path, "model: m\nlearning_rate: 5e-5\ntotal_tokens: 1.0e6")))
    assert (good.learning_rate, good.total_tokens) == (5e-5, 1_000_000)
    assert type(good.total_tokens) is int


def test_h29_the_same_mapping_from_another_yaml_reader():
    other = yaml.safe_load("learning_rate: 5e-5\ntotal_tokens: 1.0e6")  # YAML 1.1: both are text
    assert other == {"learning_rate": "5e-5", "total_tokens": "1.0e6"}
    job = build(**other)
    assert (job.learning_rate, job.total_tokens) == (5e-5, 1_000_000)
    assert "epochs=True: give a whole number" in problems(**yaml.safe_load("epochs: yes"))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5e-5", 5e-5),
        ("1.0e6", 1e6),
        ("1E3", 1e3),
        ("-2e+2", -200.0),
        (".5", 0.5),
        ("1_000", 1000),
        ("010", 10),
        (".inf", float("inf")),
        ("true", True),
        ("yes", "yes"),
        ("off", "off"),
        ("1:30", "1:30"),
        ("2026-01-02", "2026-01-02"),
        ("1.2.3", "1.2.3"),
        ("0x1f", "0x1f"),
        ("null", None),
        ("~", None),
        ("", None),
    ],
)
def test_yaml_scalars_follow_version_1_2(tmp_path, text, value):
    read = load_yaml(yaml_file(tmp_path, f"x: {text}\n"))["x"]
    assert read == value and type(read) is type(value)


# -- reading by type -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "given", "read"),
    [
        ("max_steps", "12", 12),
        ("max_steps", 1e3, 1000),
        ("max_steps", "1e3", 1000),
        ("max_steps", 10**400, 10**400),
        ("learning_rate", 1, 1.0),
        ("learning_rate", " 3e-4 ", 3e-4),
        ("learning_rate", float("inf"), float("inf")),
        ("shuffle", "no", False),
        ("shuffle", "True", True),
        ("loss", "dapo", "dapo"),
        ("precision", None, None),
        ("precision", "bf16", "bf16"),
        ("clip", "off", "off"),
        ("clip", 0.3, 0.3),
        ("clip", "0.3", 0.3),
        ("stop", ["a", "b"], ("a", "b")),
        ("seeds", (1, 2.0, "3"), [1, 2, 3]),
        ("data", "x/y.jsonl", Path("x/y.jsonl")),
        ("extra", {"a": [1, None]}, {"a": [1, None]}),
        ("tag", 5, 5),
        ("tag", "5", "5"),
        ("optim", {"lr": "1e-4", "betas": [0, 1]}, Optim(lr=1e-4, betas=(0.0, 1.0))),
        ("optim", Optim(lr=0.5), Optim(lr=0.5)),
        ("lora", {"r": 4}, Lora(r=4)),
        ("lora", None, None),
    ],
)
def test_values_are_read_by_the_type_of_their_field(name, given, read):
    value = getattr(build(**{name: given}), name)
    assert value == read and type(value) is type(read)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("max_steps", 1.5, "max_steps=1.5: give a whole number"),
        ("max_steps", "ten", "max_steps='ten': give a whole number"),
        ("max_steps", True, "max_steps=True: give a whole number"),
        ("max_steps", None, "max_steps=null: give a whole number"),
        ("max_steps", [1], "max_steps=[1]: give a whole number"),
        ("max_steps", float("inf"), "max_steps=inf: give a whole number"),
        ("learning_rate", float("nan"), "learning_rate=nan: give a number"),
        ("learning_rate", "nan", "learning_rate='nan': give a number"),
        ("learning_rate", False, "learning_rate=False: give a number"),
        ("learning_rate", 10**400, "give a number"),
        ("shuffle", 1, "shuffle=1: give true or false"),
        ("shuffle", "1", "shuffle='1': give true or false"),
        ("model", 7, "model=7: give text (put it in quotes)"),
        ("model", None, "model=null: give text"),
        ("loss", "grop", "loss='grop': give 'grpo' or 'dapo' or 'dr_grpo'; did you mean 'grpo'?"),
        ("loss", 3, "loss=3: give 'grpo' or 'dapo' or 'dr_grpo'"),
        ("clip", "of", "clip='of': give a number or 'off'"),
        ("clip", float("nan"), "clip=nan: give a number or 'off'"),
        ("stop", "abc", "stop='abc': give a list, each item text"),
        ("stop", ["a", 1], "stop[1]=1: give text (put it in quotes)"),
        ("data", "", "data='': give a path"),
        ("extra", {1: 2}, "extra={1: 2}: give a mapping with text keys"),
        ("optim", 3, "optim=3: give a mapping with keys lr, betas, warmup"),
        ("optim", {"betas": [0.9]}, "optim.betas=[0.9]: give a list of 2 values (a number, a number)"),
        ("optim", {"lr": -1}, "optim: lr=-1.0: give a positive number"),
        ("optim", {"lrr": 1}, "optim.lrr: unknown setting; did you mean 'lr'?"),
        ("lr", 1, "lr: unknown setting; did you mean 'optim.lr'?"),
        ("zzz", 1, "zzz: unknown setting; known: model, max_steps,"),
    ],
)
def test_refused_values_are_named_with_the_fix(name, given, message):
    assert message in problems(**{name: given})


def test_one_problem_is_one_line_and_says_where_it_comes_from():
    with pytest.raises(ConfigError, match=r"^job\.yaml: model: missing; give text$"):
        from_dict(Job, {}, source="job.yaml")


def test_all_problems_come_in_one_error_from_all_levels():
    message = problems(epochs="many", optim={"lr": 0, "betas": 3, "wramup": 2}, lora={"r": None}, sede=1)
    assert message.startswith("config: 6 problems\n")
    for part in ("epochs='many'", "optim: lr=0.0", "optim.betas=3", "'warmup'", "lora.r=null", "sede"):
        assert part in message
    assert "optim: optim:" not in message


def test_a_range_check_is_not_reported_for_a_value_that_could_not_be_read():
    assert problems(optim={"lr": "fast"}) == "config: optim.lr='fast': give a number"


def test_a_mapping_is_needed():
    with pytest.raises(ConfigError, match="job.yaml: holds a list; give a mapping with keys model, max_steps"):
        from_dict(Job, [1], source="job.yaml")  # type: ignore[arg-type]


def test_a_field_type_that_no_config_can_hold_is_the_programmers_error():
    @dataclass
    class Bad:
        x: set[int] = field(default_factory=set)

    Bad.__annotations__["x"] = set[int]
    with pytest.raises(TypeError, match="x: fields of type set"):
        from_dict(Bad, {"x": [1]})


# -- YAML files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: 1\nb: [1\nc: 2\n", "line 3, column 2: not YAML"),
        (b"a: 1\nb: 2\na: 3\n", "line 3, column 1: not YAML: the key 'a' is given twice"),
        (b"o:\n  lr: 1\n  lr: 2\n", "line 3, column 3: not YAML: the key 'lr' is given twice"),
        (b"- 1\n", "holds a list, not a mapping"),
        (b"just text", "holds text, not a mapping"),
        (b"1: 2\n", "the key 1 is not text"),
        (b"a:\n  - true: 2\n", "the key True is not text"),
        (b"a: \xff\n", "not UTF-8 text (byte 3)"),
        (b"a: !!python/object/apply:os.getpid []\n", "not YAML: could not determine a constructor"),
    ],
)
def test_bad_yaml_names_file_and_place(tmp_path, content, message):
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_yaml(path)
    assert str(caught.value).startswith(str(path)) and message in str(caught.value)


def test_missing_file_offers_the_nearest_name(tmp_path):
    yaml_file(tmp_path, "a: 1")
    with pytest.raises(ConfigError, match=r"jbo\.yaml: no such config file; did you mean 'job\.yaml'\?"):
        load_yaml(tmp_path / "jbo.yaml")
    with pytest.raises(ConfigError, match="no such config file$"):
        load_yaml(tmp_path / "no" / "job.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_yaml(tmp_path)


def test_empty_file_bom_crlf_and_merge_keys(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_bytes(b"")
    assert load_yaml(path) == {}
    path.write_bytes(b"\xef\xbb\xbfa: 1e-3\r\nb: x\r\n")
    assert load_yaml(path) == {"a": 1e-3, "b": "x"}
    path.write_text("base: &b {x: 1, y: 2}\nmore:\n  <<: *b\n  y: 3\n")
    assert load_yaml(path)["more"] == {"x": 1, "y": 3}


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs", "Cc"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc_", min_size=1), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.dictionaries(st.text("abcxyz_", min_size=1), plain_values, max_size=4))
def test_dumped_yaml_reads_back_equal_here_and_elsewhere(data):
    text = dump_yaml(data)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.yaml"
        path.write_text(text)
        assert load_yaml(path) == data
    assert yaml.safe_load(text) == data


@pytest.mark.parametrize(
    "text", ["5e-5", "1.0e6", "yes", "on", "010", "1:30", "2026-01-02", "null", "~", "true", "0x1f", "=", "<<"]
)
def test_text_that_looks_like_something_else_stays_text(tmp_path, text):
    dumped = dump_yaml({"x": text})
    assert load_yaml(yaml_file(tmp_path, dumped)) == {"x": text}
    assert yaml.safe_load(dumped) == {"x": text}


# -- round trip, overrides -------------------------------------------------------------------------------------------

jobs = st.builds(
    Job,
    model=st.text("abc/-", min_size=1),
    max_steps=st.integers(0, 10**9),
    learning_rate=st.floats(0, 1),
    shuffle=st.booleans(),
    loss=st.sampled_from(["grpo", "dapo", "dr_grpo"]),
    precision=st.sampled_from([None, "fp32", "bf16"]),
    clip=st.floats(0, 1) | st.just("off"),
    stop=st.lists(st.text("ab,[]:# \n", max_size=4), max_size=3).map(tuple),
    data=st.none() | st.text("ab/", min_size=1).map(Path),
    tag=st.text("a1", max_size=3) | st.integers(),
    optim=st.builds(Optim, lr=st.floats(1e-9, 1), betas=st.tuples(st.floats(0, 1), st.floats(0, 1))),
    lora=st.none() | st.builds(Lora, r=st.integers(1, 64)),
)


@settings(deadline=None)
@given(jobs)
def test_a_config_survives_dict_json_and_yaml(job):
    assert from_dict(Job, to_dict(job)) == job
    assert from_dict(Job, json.loads(json.dumps(to_dict(job)))) == job
    assert from_dict(Job, parse_yaml(dump_yaml(job), "")) == job
    assert apply_overrides(job, []) == job


def test_overrides_are_typed_by_their_field_and_the_last_one_wins():
    job = apply_overrides(
        build(optim={"warmup": 3}),
        ["max_steps=5", "optim.lr=1e-4", "seeds=1,2,3", "model=123", "lora.r=4", "optim.lr=2e-4", "shuffle=0"],
    )
    assert job.max_steps == 5 and job.seeds == [1, 2, 3] and job.model == "123" and job.shuffle is False
    assert job.optim == Optim(lr=2e-4, warmup=3)
    assert job.lora == Lora(r=4)


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("model={problem}", "model", "{problem}"),
        ("model=a=b", "model", "a=b"),
        ("model=none", "model", "none"),
        ("--max-steps=7", "max_steps", 7),
        ("precision=none", "precision", None),
        ("stop=", "stop", ()),
        ('stop=["a,b", "c"]', "stop", ("a,b", "c")),
        ("stop=a, b", "stop", ("a", "b")),
        ("optim={lr: 1e-4}", "optim", Optim(lr=1e-4, betas=(0.1, 0.2))),
        ("lora={r: 2, targets: [x]}", "lora", Lora(r=2, targets=("x",))),
        ("lora=none", "lora", None),
        ("extra.depth=3", "extra", {"old": 1, "depth": 3}),
        ("extra={a: [1]}", "extra", {"old": 1, "a": [1]}),
        ("clip=off", "clip", "off"),
        ("clip=0.4", "clip", 0.4),
        ("learning_rate=5e-5", "learning_rate", 5e-5),
    ],
)
def test_override_spellings(override, name, value):
    job = build(optim={"betas": [0.1, 0.2]}, lora={"r": 1}, precision="bf16", stop=["q"], extra={"old": 1})
    assert getattr(apply_overrides(job, [override]), name) == value


def test_overrides_report_all_problems_at_once():
    with pytest.raises(ConfigError) as caught:
        apply_overrides(build(), ["max_stpes=1", "epochs=yes", "verbose", "max_steps.x=1", "optim.lr=", "=3"])
    message = str(caught.value)
    assert message.startswith("command line: 6 problems")
    for part in (
        "max_stpes: unknown setting; did you mean 'max_steps'?",
        "epochs='yes': give a whole number",
        "'verbose': write name=value",
        "max_steps.x: 'max_steps' is a value, not a group",
        "optim.lr='': give a number",
        "'=3': write name=value",
    ):
        assert part in message


# -- differences and seeds -------------------------------------------------------------------------------------------


def test_diff_names_what_changed_and_only_that():
    old = build(optim={"lr": 1e-4}, stop=["a"], epochs=1)
    new = build(optim={"lr": 2e-4}, stop=["a", "b"], lora={"r": 4})
    changes = diff(old, new)
    assert changes == {
        "optim.lr": (1e-4, 2e-4),
        "stop": (["a"], ["a", "b"]),
        "lora": (None, ABSENT),
        "lora.r": (ABSENT, 4),
        "lora.targets": (ABSENT, ["q_proj", "v_proj"]),
    }
    assert render_diff({"optim.lr": changes["optim.lr"], "lora.r": changes["lora.r"]}) == (
        "  optim.lr: 0.0001 -> 0.0002\n  lora.r: (absent) -> 4"
    )
    assert diff(old, old) == {} == diff({"a": 1}, {"a": 1.0})
    assert diff({"a": 1}, {"a": True}) == {"a": (1, True)}
    assert diff({"a": {}}, {"a": {"b": 1}}) == {"a": ({}, ABSENT), "a.b": (ABSENT, 1)}


def test_seeds_are_fixed_differ_by_every_part_and_fit_everywhere():
    assert derive_seed(0) == derive_seed("0") == derive_seed(np.int64(0)) == 2736609759171767065
    assert derive_seed("ab", "c") == 326039466315404894
    seeds = {
        derive_seed(*parts) for parts in [(), (0,), (1,), ("ab", "c"), ("a", "bc"), ("abc",), (0, ""), ("", 0), (None,)]
    }
    assert len(seeds) == 9
    assert all(0 <= seed < 2**63 for seed in seeds)
    with pytest.raises(TypeError, match="not list"):
        derive_seed([1])  # type: ignore[arg-type]
