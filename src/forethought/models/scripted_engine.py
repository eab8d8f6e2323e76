"""An engine whose answers are written down beforehand: for tests and demonstrations, without a model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from forethought.errors import ConfigError, EngineError
from forethought.models.chat import ChatRenderer
from forethought.models.engine import EngineStats, Leaf, Sampling
from forethought.tree.tree import Kind, Stop


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One scripted sample."""

    text: str
    logprobs: tuple[float, ...] | None = None
    """One per token, the end token included; None: the engine's `logprob` for each."""
    end: bool = True
    """Whether the end token follows; without it the sample counts as cut short."""


Script = Callable[[str, int], "str | Answer"]
"""(text of the path with special tokens, index of the sample among the leaf's children) -> the answer."""


class ScriptedEngine:
    """Gives answers from a list, in order (leaf by leaf, sample by sample), or from a function.

    Stop strings and max_tokens cut an answer as they would cut a sample. `score` returns what was stored at sampling,
    and `logprob` for all other tokens, whatever the temperature.

    Args:
        answers: texts or `Answer`s, used up over all calls; or a `Script`.
        renderer: encodes the answers.
        logprob: log-prob of a token for which none was given (0 or less).
    """

    trainable = True

    def __init__(self, answers: Iterable[str | Answer] | Script, renderer: ChatRenderer, *, logprob: float = -1.0):
        if not logprob <= 0:
            raise ConfigError(f"logprob={logprob}: a log-prob is 0 or less")
        self._script: Script | None = answers if callable(answers) else None
        self._answers = [] if callable(answers) else list(answers)
        self._used = 0
        self.renderer = renderer
        self.logprob = logprob
        self.stats = EngineStats()
        self.loads = 0  # calls of load_weights

    def extend(
        self,
        leaves: Sequence[Leaf],
        n: int,
        sampling: Sampling,
        *,
        names: Sequence[str] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[list[int]]:
        """See `engine.Engine.extend`; nothing is drawn, so `names` change nothing.

        Raises:
            EngineError: n < 1, the list is used up, or an answer has another number of log-probs than tokens; then no
            tree was changed.
        """
        if n < 1:
            raise EngineError(f"n={n}: sample at least one continuation")
        want, left = len(leaves) * n, len(self._answers) - self._used
        if self._script is None and want > left:
            raise EngineError(f"{want} answers asked for, {left} of {len(self._answers)} scripted ones are left")
        rows = []
        repeated: Counter[tuple[int, int]] = Counter()
        for tree, leaf in leaves:
            before = self.renderer.tokenizer.decode(tree.path_ids(leaf)) if self._script else ""
            begin = len(tree.children(leaf)) + repeated[id(tree), leaf] * n
            repeated[id(tree), leaf] += 1
            for i in range(n):
                answer = self._script(before, begin + i) if self._script else self._answers[self._used + len(rows)]
                rows.append(self._row(Answer(text=answer) if isinstance(answer, str) else answer, sampling))
        if self._script is None:
            self._used += want
        out: list[list[int]] = []
        for number, (tree, leaf) in enumerate(leaves):
            out.append([])
            for ids, logprobs, stop in rows[number * n : (number + 1) * n]:
                self.stats.tokens_generated += len(ids)
                out[-1].append(tree.add(leaf, ids, kind=Kind.ASSISTANT, sampled=True, logprobs=logprobs, stop=stop))
        self.stats.requests += want
        if progress:
            progress(want, want)
        return out

    def _row(self, answer: Answer, sampling: Sampling) -> tuple[list[int], list[float], Stop]:
        text, stop = answer.text, Stop.EOS if answer.end else Stop.LENGTH
        found = [text.index(s) + len(s) for s in sampling.stop if s in text]
        if found:
            text, stop = text[: min(found)], Stop.STRING
        ids = self.renderer.encode(text)
        end = self.renderer.end_id
        if stop == Stop.EOS and end is not None and not sampling.ignore_eos:
            ids = [*ids, end]
        given = answer.logprobs
        if given is not None and len(given) < len(ids) or given is not None and not found and len(given) > len(ids):
            raise EngineError(
                f"the answer {answer.text!r} has {len(ids)} tokens but {len(given)} log-probs: give one each"
            )
        logprobs = list(given[: len(ids)]) if given is not None else [self.logprob] * len(ids)
        if len(ids) > sampling.max_tokens:
            ids, logprobs, stop = ids[: sampling.max_tokens], logprobs[: sampling.max_tokens], Stop.LENGTH
        return ids, logprobs, stop

    def score(self, leaves: Sequence[Leaf], *, temperature: float = 1.0) -> list[np.ndarray]:
        """See `engine.Engine.score`."""
        out = []
        for tree, leaf in leaves:
            values = tree.logprob[tree.path_tokens(leaf)].copy()
            values[np.isnan(values)] = self.logprob
            values[:1] = math.nan
            self.stats.tokens_scored += max(0, len(values) - 1)
            out.append(values)
        return out

    def load_weights(self, state: dict) -> None:
        """Counts the call: there are no weights."""
        self.loads += 1
