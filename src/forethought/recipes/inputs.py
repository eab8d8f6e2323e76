"""What `forethought train` and `forethought eval` share: records as tasks with their prompts, and rewards by name.

Prompts follow TRL: a text is raw text, a list of messages is a conversation that the model's chat template renders.
`chat` makes a user turn of every text; then reward functions of TRL's style see conversations, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from forethought.data import load_tasks
from forethought.errors import ConfigError, DataError, RewardError
from forethought.models.engine import Sampling
from forethought.recipes.session import Workbench
from forethought.rewards.adapters import Decode, Item, Outcome, RewardRunner, combine, load_reward
from forethought.rewards.math_rewards import OutcomeReward
from forethought.rewards.reward import Reward
from forethought.rewards.scorers import TrainerState
from forethought.rewards.verify import Extract, Mode, Verifier, gold_texts
from forethought.tree.tree import Stop, TokenTree

Task = Mapping[str, Any]
Say = Callable[[str], None]

NO_REWARD = (
    "no reward: give --reward FILE.py:NAME (a TRL-style, verl-style or native function), or --reward math for the math "
    "verifier on the column 'answer'"
)


# -- records -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """How answers are sampled. samples: answers (or episodes) a task."""

    samples: int = 1
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0

    def sample_problems(self) -> list[str]:
        """What is wrong with these settings, each with its fix."""
        bad = []
        if self.samples < 1:
            bad.append(f"samples={self.samples}: give at least 1")
        if self.samples > 1 and self.temperature == 0:
            bad.append(
                f"samples={self.samples} at temperature 0 would all be the same; give a --temperature, or 1 sample"
            )
        return bad

    def sampling(self) -> Sampling:
        """Raises: ConfigError for a setting out of its range."""
        return Sampling(
            max_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stop=self.stop,
            seed=self.seed,
        )


def short_name(model: str) -> str:
    """A model's name for tables: the end of its id or path."""
    parts = [p for p in model.split("/") if p]
    return "/".join(parts[-2:] if parts[-1] in ("model", "model-merged") else parts[-1:])


@dataclass(frozen=True, kw_only=True)
class Columns:
    """How records become prompts."""

    prompt_column: str = "prompt"
    """Column of the prompt: a name, a dotted name, or text with columns in braces."""
    answer_column: str | None = None
    """Column that rewards read as `answer` (default: answer, where there is one)."""
    suffix: str = ""
    """Text behind every prompt (behind the last user message of a conversation)."""
    chat: bool = False
    """Make a user turn of every prompt that is text."""
    limit: int | None = None
    """Use the first records only."""


def load_prompts(path: str, columns: Columns, *, id_column: str | None = "id") -> list[Task]:
    """The tasks of a file with their prompts as they will be rendered; see `data.load_tasks` for their ids.

    Raises:
        DataError: see `data.load_tasks`; or a suffix has no user message to stand behind.
    """
    tasks = load_tasks(
        path, columns.prompt_column, columns.answer_column or "answer", columns.limit, id_column=id_column
    )
    return [{**task, "prompt": _prompt(task, columns)} for task in tasks]


def _prompt(task: Task, columns: Columns) -> str | list[dict[str, Any]]:
    prompt = task["prompt"]
    if isinstance(prompt, str):
        text = prompt + columns.suffix
        return [{"role": "user", "content": text}] if columns.chat else text
    messages = [dict(m) for m in prompt]
    if columns.suffix:
        last = next((m for m in reversed(messages) if m["role"] == "user"), None)
        if last is None or not isinstance(last.get("content"), str):
            raise DataError(f"task {task['id']!r}: no user message with text that the suffix could stand behind")
        last["content"] += columns.suffix
    return messages


def encode_prompts(bench: Workbench, tasks: Sequence[Task], what: str, new_tokens: int, say: Say) -> list[list[int]]:
    """Ids of every prompt. Conversations also end at the chat template's end of turn.

    Args:
        what: name of the data, for messages. new_tokens: what a response may take.

    Raises:
        DataError: a prompt cannot be rendered, or fills the context (number of those, the first one).
    """
    texts = sum(isinstance(t["prompt"], str) for t in tasks)
    if texts < len(tasks):
        policy = bench.policy
        policy.eos_ids = tuple(dict.fromkeys((*policy.eos_ids, *bench.renderer.end_ids)))
    if texts and bench.policy.tokenizer.chat_template:
        say(f"{what}: text prompts stay raw text; this model has a chat template: --chat makes user turns of them")
    ids = []
    for task in tasks:
        try:
            ids.append(bench.prompt_ids(task))
        except DataError as err:
            raise DataError(f"{what}, task {task['id']!r}: {err}") from err
    context = bench.policy.context
    full = [i for i, prompt in enumerate(ids) if len(prompt) + 1 > context]
    if full:
        raise DataError(
            f"{what}: {len(full)} of {len(tasks)} prompts fill the model's context of {context} tokens; the first is "
            f"task {tasks[full[0]]['id']!r} with {len(ids[full[0]])} tokens: shorten or leave out such records"
        )
    tight = sum(len(prompt) + new_tokens > context for prompt in ids)
    if tight:
        say(
            f"{what}: {tight} of {len(tasks)} prompts leave less than max_new_tokens={new_tokens} in the context of "
            f"{context}; their responses are cut earlier"
        )
    return ids


# -- rewards -----------------------------------------------------------------------------------------------------------


class MathReward:
    """The math verifier under the name `math` or `math:EXTRACT`: 1 where the response's answer equals `answer`.

    Counts as a native batch reward, so it can be one of several. Parts: see `OutcomeReward`.
    """

    def __init__(self, decode: Decode, *, extract: Extract = "box", mode: Mode = "math-verify"):
        self.decode = decode
        self.extract: Extract = extract
        self.mode: Mode = mode
        self._verifier: Verifier | None = None
        self.name = self.__name__ = "math"

    def batch(self, items: Sequence[Item]) -> list[Outcome]:
        if self._verifier is None:
            self._verifier = Verifier(mode=self.mode, extract=self.extract)
        return list(OutcomeReward(self.decode, self._verifier).judge_many(items))

    def __call__(self, tree: TokenTree, leaf: int, task: Task) -> Reward:
        outcome = self.batch([(tree, leaf, task)])[0]
        assert isinstance(outcome, Reward)  # the verifier knows no failure
        return outcome

    def check(self, tasks: Sequence[Task]) -> None:
        """Every task has a usable gold answer. Raises: DataError."""
        bad = [t for t in tasks if t.get("answer") is None]
        if bad:
            raise DataError(
                f"the math verifier needs the right answer as column 'answer', which {len(bad)} of {len(tasks)} "
                f"records lack (columns of record {bad[0]['id']}: {', '.join(k for k in bad[0] if k != 'id')}): name "
                "the column with --answer-column, or judge with --reward FILE.py:NAME"
            )
        for task in tasks:
            try:
                gold_texts(task["answer"])
            except RewardError as err:
                raise DataError(f"record {task['id']}: its answer cannot be used: {err}") from err

    def close(self) -> None:
        if self._verifier is not None:
            self._verifier.close()


class Judge:
    """Rewards by name as the judge of training and evaluation; a context manager that ends their processes.

    Args:
        specs: `FILE.py:NAME` or `package.module:NAME` (TRL, verl or native style, detected), or `math`, `math:EXTRACT`.
        weights: one per reward; by default 1 each. Several rewards are added up.
        timeout: seconds for one call of a user's function; see `RewardRunner`.

    Raises:
        ConfigError: a wrong name, a file that fails to load, weights that do not match.
    """

    def __init__(self, specs: Sequence[str], weights: Sequence[float] = (), *, timeout: float = 60.0):
        if weights and len(weights) != len(specs):
            raise ConfigError(f"reward_weights={list(weights)}: {len(specs)} rewards need {len(specs)} weights")
        self._decode: Decode = lambda ids: "".join(map(chr, ids))
        self.math = [_math(s, self.decode) if s == "math" or s.startswith("math:") else None for s in specs]
        functions: list[Any] = [m or load_reward(s) for s, m in zip(specs, self.math, strict=True)]
        self.only_math = self.math[0] if len(specs) == 1 and not weights else None
        if len(specs) == 1 and not weights:
            fn: Any = functions[0]
        else:
            names = [f.name for f in functions]
            names = [n if names.count(n) == 1 else f"{n}_{i}" for i, n in enumerate(names)]
            fn = combine(list(zip(names, functions, weights or [1.0] * len(specs), strict=True)), decode=self.decode)
        self.runner = RewardRunner(fn, timeout=timeout, decode=self.decode)

    def decode(self, ids: list[int]) -> str:
        """Until a model is there (`bind`), ids are code points."""
        return self._decode(ids)

    def bind(self, decode: Decode) -> None:
        self._decode = decode

    @property
    def state(self) -> TrainerState:
        """What TRL functions see as `trainer_state`."""
        return self.runner.state

    def check(self, tasks: Sequence[Task], say: Say) -> None:
        """Before compute: columns, and a trial call on two short responses.

        Raises:
            DataError: a column is missing. RewardError: the function hangs, dies, or returns something that is no
            reward (NaN, text, another number of values). One that raises is only told: other responses may suit it.
        """
        for math in filter(None, self.math):
            math.check(tasks)
        self.runner.check(tasks)
        if all(self.math):
            return
        items = []
        for task, text in ((tasks[0], "0"), (tasks[-1], str(tasks[-1].get("answer", "yes")))):
            tree = TokenTree([ord("?")], task=str(task["id"]))
            ids = [ord(c) for c in text[:1000]] or [ord("0")]
            items.append((tree, tree.add(0, ids, sampled=True, logprobs=[0.0] * len(ids), stop=Stop.EOS), task))
        failed = [o for o in self.runner(items) if isinstance(o, RewardError)]
        self.runner.take_logs()
        for error in failed:
            if " raised " not in str(error):
                raise RewardError(f"trial call before the run: {error}")
        if failed:
            say(f"trial call of the reward: {failed[0]}; samples on which it fails are left out of training")

    def __call__(self, items: Sequence[Item]) -> list[Outcome]:
        if self.only_math:  # its own limit is per check, so the batch needs none
            return self.only_math.batch(items)
        return self.runner(items)

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.close()
        for math in filter(None, self.math):
            math.close()


def _math(spec: str, decode: Decode) -> MathReward:
    wanted = spec.partition(":")[2] or "box"
    extract: Extract | None = next((e for e in get_args(Extract) if e == wanted), None)
    if extract is None:
        raise ConfigError(f"reward {spec!r}: write math or math:EXTRACT with one of {', '.join(get_args(Extract))}")
    return MathReward(decode, extract=extract)
