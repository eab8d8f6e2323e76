r"""The text of a language model as the world of a search: a node is a prefix, an edge is an option.

An option (AlphaLLM, arXiv 2404.12253) is a span of tokens that a termination rule ends: one token, a line, a paragraph
that holds a formula, or any length. Options are sampled with `Engine.extend` on the nodes of a `TokenTree`, so that
prefixes are shared, each token is generated once, and the ids that a critic reads are those that were sampled; text is
never turned back into ids. With an engine that keeps keys and values (`TorchEngine.reuse`) each token is also run once.

State merging: a new option that says the same as a sibling is no new child. All options that are missing at a node are
drawn in one request, compared in sample order, and only what is lacking is drawn again.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from forethought.errors import ConfigError, EngineError
from forethought.models.engine import Engine, Leaf, Sampling
from forethought.search.critics import Judgement, Scale, check_scale, read_judgements
from forethought.search.env_world import ask_all
from forethought.search.forest import Forest
from forethought.search.mcts import Answers, Requests, Status, new_counts
from forethought.tree.tree import Stop, TokenTree

_FORMULA = re.compile(r"\$[^$]+\$|\\\[|\\\(|[\w)}]\s*[=<>]\s*[-\w({\\]")


def has_formula(text: str) -> bool:
    """AlphaLLM's rule for MATH: a paragraph ends an option if it holds a formula, else the next one belongs to it."""
    return _FORMULA.search(text) is not None


def _lines() -> Sampling:
    return Sampling(max_tokens=64, stop=("\n",), temperature=0.8)


@dataclass(frozen=True, kw_only=True)
class Option:
    """What one edge is, and how it is sampled.

    sampling: one part of an option: its stop strings and max_tokens end the part (`Sampling(max_tokens=1)`: token by
        token). ends: text of the option so far -> whether it ends at this stop string; None: always. parts: how many
        parts it may have.
    greedy_first: the first option of every node is the greedy one. final: how options at the depth limit are sampled,
        which go to the end in one piece; None: as all others.
    """

    sampling: Sampling = field(default_factory=_lines)
    ends: Callable[[str], bool] | None = None
    parts: int = 4
    greedy_first: bool = False
    final: Sampling | None = None

    def __post_init__(self):
        if self.parts < 1:
            raise ConfigError(f"option: parts={self.parts}: give at least 1")


def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance in characters."""
    before = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        now = [i]
        for j, y in enumerate(b, 1):
            now.append(min(before[j] + 1, now[-1] + 1, before[j - 1] + (x != y)))
        before = now
    return before[-1]


@dataclass(frozen=True, kw_only=True)
class TextMerge:
    """When an option says the same as a sibling: distance below `threshold`.

    distance: "exact" (0 for equal text, else 1), "edit" (characters), "normalised" (edit over the longer length), or a
        function of two texts (1 - cosine of embeddings, a model's yes or no as 0 or 1 ...).
    numbers: texts whose numbers differ never say the same, however close ("3 + 4 = 7" and "3 + 5 = 8").
    mode: where no draw passes, "strict" makes no child, "compatible" (AlphaLLM's code) keeps the most distant draw.
    rounds: draws of what is lacking, at most.
    """

    distance: Literal["exact", "edit", "normalised"] | Callable[[str, str], float] = "exact"
    threshold: float = 1.0
    numbers: bool = False
    mode: Literal["strict", "compatible"] = "strict"
    rounds: int = 5

    def __post_init__(self):
        if not callable(self.distance) and self.distance not in ("exact", "edit", "normalised"):
            raise ConfigError(f"merge: distance={self.distance!r}: 'exact', 'edit', 'normalised' or a function")
        if self.mode not in ("strict", "compatible"):
            raise ConfigError(f"merge: mode={self.mode!r}: give 'strict' or 'compatible'")
        if not self.threshold > 0 or self.rounds < 1:
            raise ConfigError(f"merge: threshold={self.threshold}, rounds={self.rounds}: both must be positive")

    def between(self, a: str, b: str) -> float:
        a, b = a.strip(), b.strip()
        if self.numbers and re.findall(r"\d+(?:\.\d+)?", a) != re.findall(r"\d+(?:\.\d+)?", b):
            return math.inf
        if callable(self.distance):
            return float(self.distance(a, b))
        if self.distance == "exact":
            return float(a != b)
        edits = edit_distance(a, b)
        return edits if self.distance == "edit" else edits / max(len(a), len(b), 1)

    def nearest(self, text: str, siblings: Sequence[str]) -> float:
        """Distance to the nearest sibling, infinite without one."""
        return min((self.between(text, s) for s in siblings), default=math.inf)


@dataclass(frozen=True)
class TextLeaf:
    """A prefix as critics see it.

    tree, node: the tokens. root: the node that the search began at. ended: nothing follows. task: as given.
    text: what was said since the root. name: of the tree in the search.
    """

    tree: TokenTree
    node: int
    root: int
    ended: bool
    text: str
    name: str
    task: Any = None


TextCritic = Callable[[Sequence[TextLeaf]], Sequence[float | Judgement | Exception]]


@dataclass
class _Draw:
    """An option that was sampled: its token nodes, the text, and whether it failed."""

    nodes: list[int]
    text: str = ""
    status: Status = Status.OK
    distance: float = math.inf


class TextDomain:
    """Options of a language model as the world of a search; see `mcts.Domain`.

    Args:
        engine: samples the options.
        roots: token trees, extended in place; (tree, node) to begin elsewhere than at the tree's root.
        critic: values of prefixes; None: all 0.
        decode: token ids -> text.
        option, merge: see there; merge None keeps every option.
        finished: text since the root -> whether the answer is complete; an end token always ends a path.
        scale: (lowest, highest) value of the critic; a number outside it ends the search with an error.
        value_roots: the roots are judged too (importance width needs it). tasks: one a root, handed to the critic.

    Raises:
        ConfigError: no roots, two trees of one name. EngineError: a root's path is empty.
    """

    grows = True
    lists_all = False

    def __init__(
        self,
        engine: Engine,
        roots: Sequence[TokenTree | Leaf],
        critic: TextCritic | None = None,
        *,
        decode: Callable[[Sequence[int]], str],
        option: Option | None = None,
        merge: TextMerge | None = None,
        finished: Callable[[str], bool] | None = None,
        scale: Scale | None = None,
        value_roots: bool = False,
        tasks: Sequence[Any] | None = None,
    ):
        self.leaves: list[Leaf] = [r if isinstance(r, tuple) else (r, 0) for r in roots]
        self.engine, self.critic, self.decode = engine, critic, decode
        self.option, self.merge, self.finished = option or Option(), merge, finished
        check_scale(scale)
        self.scale, self.value_roots = scale, value_roots
        self.tasks = list(tasks) if tasks is not None else [None] * len(self.leaves)
        if len(self.tasks) != len(self.leaves):
            raise ConfigError(f"{len(self.tasks)} tasks for {len(self.leaves)} roots: give one each")
        self.names = [tree.task or str(i) for i, (tree, _) in enumerate(self.leaves)]
        if len(set(self.names)) < len(self.names):
            twice = next(n for n in self.names if self.names.count(n) > 1)
            raise ConfigError(f"search: two trees have the task {twice!r}; samples of both would be the same")
        for name, (tree, node) in zip(self.names, self.leaves, strict=True):
            if not tree.path_length(node):
                raise EngineError(f"task {name!r}: the path to the root is empty; begin it with at least one token")
        self.columns: tuple[str, ...] = tuple(getattr(critic, "columns", ()))
        self.counts: defaultdict[str, np.ndarray] = new_counts(len(self.leaves))
        join = getattr(critic, "attach", None)
        if join is not None:
            join(self.names, self.counts)
        trees = range(len(self.leaves))
        self.tokens: list[list[list[int]]] = [[] for _ in trees]
        """Per tree and node of the search: the token nodes of its option, the last one being where it ends."""
        self.texts: list[list[str]] = [[] for _ in trees]
        self._parents: list[list[int]] = [[] for _ in trees]
        self._siblings: list[dict[int, list[str]]] = [{} for _ in trees]
        self._waiting: list[dict[int, list[_Draw]]] = [{} for _ in trees]  # sampled, but not judged yet

    @contextmanager
    def session(self) -> Iterator[None]:
        """Keys and values are kept while a search runs."""
        keep = getattr(self.engine, "reuse", None)
        if keep is None:
            yield
        else:
            with keep():
                yield

    # -- the protocol --
    def roots(self) -> Answers:
        answers = Answers.blank(len(self.leaves), self.columns)
        draws = [_Draw([node]) for _, node in self.leaves]
        if self.value_roots:
            self._judge(answers, [(t, -1, draw) for t, draw in enumerate(draws)], list(range(len(draws))))
        answers.state = [(-1, draw) for draw in draws]
        return answers

    def open(self, requests: Requests) -> Answers:
        trees, parents = requests.trees.tolist(), requests.parents.tolist()
        final = requests.final.tolist()
        drawn: list[_Draw | None] = [None] * len(requests)
        passed: list[list[_Draw]] = [[] for _ in range(len(requests))]  # draws that said the same as a sibling
        fresh: dict[tuple[int, int], list[str]] = {}
        for i, (t, node) in enumerate(zip(trees, parents, strict=True)):
            waiting = self._waiting[t].get(node)
            if waiting:
                drawn[i] = waiting.pop(0)
                fresh.setdefault((t, node), []).append(drawn[i].text)  # type: ignore[union-attr]
        for _ in range(self.merge.rounds if self.merge else 1):
            wanted = [i for i in range(len(requests)) if drawn[i] is None]
            if not wanted:
                break
            for i, draw in zip(wanted, self._sample([(trees[i], parents[i], final[i]) for i in wanted]), strict=True):
                if draw.status is not Status.OK:
                    drawn[i] = draw
                    continue
                known = self._siblings[trees[i]].get(parents[i], []) + fresh.get((trees[i], parents[i]), [])
                draw.distance = math.inf if self.merge is None else self.merge.nearest(draw.text, known)
                if self.merge is None or draw.distance >= self.merge.threshold:
                    drawn[i] = draw
                    fresh.setdefault((trees[i], parents[i]), []).append(draw.text)
                else:
                    passed[i].append(draw)
                    self.counts["repeated"][trees[i]] += 1
                    self.leaves[trees[i]][0].meta[draw.nodes[-1]]["repeats"] = True
        answers = Answers.blank(len(requests), self.columns)
        for i, draw in enumerate(drawn):
            if draw is None and self.merge is not None and self.merge.mode == "compatible":
                drawn[i] = draw = max(passed[i], key=lambda d: d.distance)
                self.leaves[trees[i]][0].meta[draw.nodes[-1]].pop("repeats", None)
            answers.status[i] = Status.MERGED if draw is None else draw.status
        sound = [i for i in range(len(requests)) if answers.status[i] == Status.OK]
        self._judge(answers, [(trees[i], parents[i], drawn[i]) for i in sound], sound)  # type: ignore[misc]
        answers.edge_prior = np.ones(len(requests))
        for i in sound:
            draw = drawn[i]
            assert draw is not None
            if answers.status[i] != Status.OK:
                self._waiting[trees[i]].setdefault(parents[i], []).append(draw)
            answers.edge_prior[i] = self._probability(trees[i], draw)
        answers.state = list(zip(parents, drawn, strict=True))
        return answers

    def store(self, answers: Answers, index: np.ndarray, trees: np.ndarray, nodes: np.ndarray) -> None:
        for i, tree, node in zip(index.tolist(), trees.tolist(), nodes.tolist(), strict=True):
            parent, draw = answers.state[i]
            if node == 0:
                self.tokens[tree], self.texts[tree], self._parents[tree] = [], [], []
                self._siblings[tree], self._waiting[tree] = {}, {}
            self.tokens[tree].append(draw.nodes)
            self.texts[tree].append(draw.text)
            self._parents[tree].append(parent)
            if parent >= 0:
                self._siblings[tree].setdefault(parent, []).append(draw.text)

    # -- sampling --
    def _sample(self, places: Sequence[tuple[int, int, bool]]) -> list[_Draw]:
        """One draw each at (tree, node, whether it is final)."""
        out = [_Draw([]) for _ in places]
        groups: dict[tuple[bool, bool], list[int]] = {}
        begun: set[tuple[int, int]] = set()
        for i, (t, node, final) in enumerate(places):
            greedy = self.option.greedy_first and (t, node) not in begun and not self._siblings[t].get(node)
            begun.add((t, node))
            groups.setdefault((greedy, final and self.option.final is not None), []).append(i)
        for (greedy, final), members in groups.items():
            sampling = (self.option.final if final else None) or self.option.sampling
            if greedy:
                sampling = replace(sampling, temperature=0.0)
            self._parts([(places[i], out[i]) for i in members], sampling, single=final)
        return out

    def _parts(self, work: list[tuple[tuple[int, int, bool], _Draw]], sampling: Sampling, *, single: bool) -> None:
        """Sample part after part until every option has ended."""
        for number in range(self.option.parts):
            leaves = [
                (self.leaves[t][0], draw.nodes[-1] if draw.nodes else self.tokens[t][node][-1])
                for (t, node, _), draw in work
            ]
            left = []
            for entry, (node,) in zip(work, self.engine.extend(leaves, 1, sampling), strict=True):
                (t, parent, _), draw = entry
                tree = self.leaves[t][0]
                draw.nodes.append(node)
                self.counts["tokens"][t] += int(tree.length[node])
                if tree.stop[node] == Stop.ERROR:
                    draw.status = Status.FAILED
                    continue
                draw.text = self.decode([i for n in draw.nodes for i in tree.node_ids(n)])
                stopped = tree.stop[node] == Stop.STRING
                ends = self.option.ends
                if stopped and not single and ends is not None and number + 1 < self.option.parts:
                    if not ends(draw.text):
                        left.append(entry)
                        continue
                if not draw.text.strip() and not any(self.texts[t][n].strip() for n in self._path(t, parent)):
                    draw.status = Status.FAILED  # nothing was said at all: the search gives up after some of these
                    self.counts["empty"][t] += 1
            work = left
            if not work:
                break

    def _path(self, t: int, node: int) -> Iterator[int]:
        """Nodes of the search from `node` up, without the root."""
        while node > 0:
            yield node
            node = self._parents[t][node]

    def _probability(self, t: int, draw: _Draw) -> float:
        """Mean probability a token of an option (geometric); 1 where the engine tells none."""
        tree = self.leaves[t][0]
        logs = np.concatenate([tree.logprob[tree.span(n)] for n in draw.nodes])
        logs = logs[np.isfinite(logs)]
        return float(np.exp(logs.mean())) if len(logs) else 1.0

    # -- judging --
    def _judge(self, answers: Answers, work: Sequence[tuple[int, int, _Draw]], index: list[int]) -> None:
        leaves = []
        for i, (t, parent, draw) in zip(index, work, strict=True):
            tree, root = self.leaves[t]
            node = draw.nodes[-1]
            before = [self.texts[t][n] for n in self._path(t, parent)][::-1] if parent >= 0 else []
            text = "".join([*before, draw.text])
            cut = bool(tree.sampled[node]) and node != root and tree.length[node] == 0  # no room in the context
            ended = node != root and (tree.stop[node] == Stop.EOS or cut or bool(self.finished and self.finished(text)))
            answers.ended[i] = ended
            leaves.append(TextLeaf(tree, node, root, bool(ended), text, self.names[t], self.tasks[t]))
        if self.critic is None:
            answers.value[index] = 0.0
        elif leaves:
            for t, _, _ in work:
                self.counts["evaluations"][t] += 1
            results = ask_all(self.critic, leaves)
            read_judgements(answers, index, results, [leaf.name for leaf in leaves], self.scale)

    # -- reading and storing --
    def action(self, tree: int, node: int, slot: int) -> str:
        """Text of an edge."""
        return self._siblings[tree].get(node, [])[slot]

    def annotate(self, forest: Forest) -> None:
        """Write visits, values and priors of the search onto the token trees, for credit and reports."""
        for t, (tree, _) in enumerate(self.leaves):
            for node, tokens in enumerate(self.tokens[t]):
                row = forest.edge_rows(t, node)
                parent, slot = int(forest.parent[row]), int(forest.slot[row])
                value = float(forest.value_of(np.array([row]))[0])
                facts = {"raw": float(forest.raw[row])}
                facts |= {name: float(column[row]) for name, column in forest.columns.items()}
                for place in tokens if node else tokens[-1:]:
                    tree.visits[place] = int(forest.visits[row])
                    tree.value[place] = value
                    if parent >= 0:
                        tree.prior[place] = float(forest.prior[forest.edge_rows(t, parent), slot])
                tree.meta[tokens[-1]]["search"] = {k: v for k, v in facts.items() if math.isfinite(v)}

    def to_json(self) -> list[Any]:
        """What stands beside the token trees."""
        return [
            {
                "root": self.leaves[t][1],
                "tokens": self.tokens[t],
                "texts": self.texts[t],
                "waiting": [
                    {"node": node, "tokens": d.nodes, "text": d.text}
                    for node, ds in self._waiting[t].items()
                    for d in ds
                ],
            }
            for t in range(len(self.leaves))
        ]

    def to_arrays(self) -> dict[str, dict[str, np.ndarray]]:
        """The token trees, by name."""
        return {name: tree.to_arrays() for name, (tree, _) in zip(self.names, self.leaves, strict=True)}

    def from_json(self, stored: list[Any], forest: Forest) -> None:
        """Take over what `to_json` gave; the domain was made with the stored token trees."""
        for t, entry in enumerate(stored):
            self.leaves[t] = (self.leaves[t][0], int(entry["root"]))
            self.tokens[t], self.texts[t] = entry["tokens"], entry["texts"]
            self._siblings[t], self._waiting[t] = {}, {}
            self._parents[t] = [int(forest.parent[forest.edge_rows(t, n)]) for n in range(len(self.texts[t]))]
            for node, parent in enumerate(self._parents[t]):
                if parent >= 0:
                    self._siblings[t].setdefault(parent, []).append(self.texts[t][node])
            for draw in entry["waiting"]:
                self._waiting[t].setdefault(draw["node"], []).append(_Draw(draw["tokens"], draw["text"]))


class TextRollouts:
    """Mean score of answers that a (small, fast) model writes on from a prefix; an ended prefix is scored itself.

    Args:
        engine: the fast model; it may be the policy's. score: finished leaves (tree, node, task) -> numbers or errors.
        n: answers a prefix. sampling: how to write on.
        bridge: path ids of the policy -> ids of the fast model, where their tokenizers differ; None: the same.

    Rollouts stand in trees of their own (`trees`, by name), so that the search tree holds the policy's tokens only.
    """

    def __init__(
        self,
        engine: Engine,
        score: Callable[[Sequence[tuple[TokenTree, int, Any]]], Sequence[float | Exception]],
        *,
        n: int = 4,
        sampling: Sampling | None = None,
        bridge: Callable[[Sequence[int]], Sequence[int]] | None = None,
    ):
        if n < 1:
            raise ConfigError(f"rollouts: n={n}: give at least 1")
        self.engine, self.score, self.n, self.bridge = engine, score, n, bridge
        self.sampling = sampling or Sampling(max_tokens=128)
        self.trees: dict[str, TokenTree] = {}
        self._places: dict[str, dict[int, int]] = {}
        self._counts: defaultdict[str, np.ndarray] = defaultdict(lambda: np.zeros(0, np.int64))
        self._number: dict[str, int] = {}

    @property
    def most_tokens(self) -> int:
        """Tokens that one prefix may cost."""
        return self.n * self.sampling.max_tokens

    def attach(self, names: Sequence[str], counts: defaultdict[str, np.ndarray]) -> None:
        """Count tokens in a search's accounts, and begin with no trees."""
        self._counts, self._number = counts, {name: i for i, name in enumerate(names)}
        self.trees, self._places = {}, {}

    def __call__(self, leaves: Sequence[TextLeaf]) -> list[float | Exception | list[float]]:
        open_ = [i for i, leaf in enumerate(leaves) if not leaf.ended]
        places = [self._place(leaf) for leaf in leaves]
        new = self.engine.extend([places[i] for i in open_], self.n, self.sampling) if open_ else []
        items = [(*places[i], leaves[i].task) for i in range(len(leaves)) if leaves[i].ended]
        for i, nodes in zip(open_, new, strict=True):
            tree, name = places[i][0], leaves[i].name
            spent = int(sum(tree.length[n] for n in nodes))
            self._counts["tokens"][self._number[name]] += spent
            self._counts["rollout_tokens"][self._number[name]] += spent
            items += [(tree, n, leaves[i].task) for n in nodes]
        scores = iter(self.score(items))
        out: dict[int, Any] = {i: next(scores) for i in range(len(leaves)) if leaves[i].ended}
        for i in open_:
            mine = [next(scores) for _ in range(self.n)]
            failed = next((s for s in mine if isinstance(s, Exception)), None)
            out[i] = failed if failed is not None else [float(s) for s in mine]  # type: ignore[arg-type]
        return [out[i] for i in range(len(leaves))]

    def _place(self, leaf: TextLeaf) -> Leaf:
        """The prefix in the rollouts' own tree."""
        if self.bridge is not None:
            name = f"{leaf.name}/{leaf.node}"
            tree = self.trees.setdefault(name, TokenTree(self.bridge(leaf.tree.path_ids(leaf.node)), task=name))
            return tree, 0
        if leaf.name not in self.trees:
            self.trees[leaf.name] = TokenTree(leaf.tree.path_ids(leaf.root), task=f"{leaf.name}/rollouts")
            self._places[leaf.name] = {leaf.root: 0}
        tree, places = self.trees[leaf.name], self._places[leaf.name]
        path = leaf.tree.path(leaf.node)
        for node in path[path.index(leaf.root) + 1 :]:
            if node not in places:
                above = places[int(leaf.tree.parent[node])]
                places[node] = tree.add(above, leaf.tree.node_ids(node), stop=Stop(int(leaf.tree.stop[node])))
        return tree, places[leaf.node]
