"""The front door: `search(roots, policy, world, critic, budget)` -> trees with visits, values and training targets.

The world is a factory of environments (or one environment's class), an engine (text: the model is its own policy), or
an `ArrayModel`. What comes back can be read tree by tree, continued, saved and loaded.

File format, version 1: a NumPy archive (.npz, compressed, no pickles) with `header` (UTF-8 JSON: version, kind of world,
names, settings, counters, what stands beside the arrays) and the arrays of the forest and of the token trees.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forethought.config import to_dict
from forethought.errors import ConfigError, DataError
from forethought.files import finite, from_json, to_json, write_atomic
from forethought.models.engine import Engine
from forethought.search.arrays import ArrayDomain, ArrayModel
from forethought.search.env_world import EnvDomain, EnvRoot
from forethought.search.mcts import Budget, Domain, Search, SearchConfig
from forethought.search.result import SearchTree, read_tree
from forethought.search.text_world import TextDomain
from forethought.tree.tree import TokenTree

SCHEMA = 1


class SearchResult:
    """What a search has found so far.

    Attributes: search (its forest, counts, stopped, found, interrupted), trees (one `SearchTree` each, made when read).
    The token trees of a text search carry visits, values and priors after every `run`.
    """

    def __init__(self, search: Search):
        self.search = search
        self._trees: list[SearchTree] | None = None

    @property
    def trees(self) -> list[SearchTree]:
        if self._trees is None:
            self._trees = [read_tree(self.search, t) for t in range(len(self.search.domain.names))]
        return self._trees

    @property
    def interrupted(self) -> bool:
        """Ctrl-C ended it; `run` goes on."""
        return self.search.interrupted

    @property
    def counts(self) -> dict[str, int]:
        """What was spent, over all trees."""
        return {name: int(values.sum()) for name, values in self.search.counts.items()}

    def run(self, budget: Budget, *, progress: Callable[[int], None] | None = None) -> SearchResult:
        """Go on with a larger budget (what was spent before counts)."""
        self._trees = None
        try:
            self.search.run(budget, progress=progress)
        finally:
            if isinstance(self.search.domain, TextDomain):
                self.search.domain.annotate(self.search.forest)
        return self

    def save(self, path: str | Path) -> None:
        """Write everything that a later session needs to go on; what is there is replaced as a whole.

        Raises:
            RunError: disk full or not writable. ConfigError: the world is an array model, which has no file form.
        """
        search = self.search
        domain = search.domain
        if not isinstance(domain, EnvDomain | TextDomain):
            raise ConfigError(f"a search over {type(domain).__name__} cannot be saved; its states are the model's own")
        header: dict[str, Any] = {
            "schema": SCHEMA,
            "kind": "text" if isinstance(domain, TextDomain) else "env",
            "names": domain.names,
            "config": _settings(search.config),
            "columns": list(domain.columns),
            "counts": {name: values.tolist() for name, values in search.counts.items()},
            "stopped": search.stopped,
            "found": search.found.tolist(),
            "state": search.state(),
            "world": domain.to_json(),
            "token_trees": {},
        }
        arrays = {f"forest/{k}": v for k, v in search.forest.to_arrays().items()}
        holder: Any = domain if isinstance(domain, TextDomain) else domain.policy
        for number, (name, columns) in enumerate(getattr(holder, "to_arrays", dict)().items()):
            header["token_trees"][name] = number
            arrays |= {f"tokens/{number}/{k}": v for k, v in columns.items()}
        arrays["header"] = np.frombuffer(to_json(finite(header)).encode(), np.uint8)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
        write_atomic(path, buffer.getvalue())


def search(
    roots: Sequence[Any],
    policy: Any,
    world: Any,
    critic: Any = None,
    budget: Budget | None = None,
    *,
    config: SearchConfig | None = None,
    progress: Callable[[int], None] | None = None,
    **settings: Any,
) -> SearchResult:
    """Search from every root, all trees together.

    Args:
        roots: for environments tasks (or `EnvRoot`s); for text `TokenTree`s or (tree, node); for an array model [].
        policy: for environments a `Policy`; for text and array models None (the world proposes).
        world: a factory of environments, an `Engine`, or an `ArrayModel`.
        critic: see `env_world.Critic` and `text_world.TextCritic`.
        budget: what each tree may spend; needed.
        config: how to search. progress: called with the simulations so far.
        settings: of `EnvDomain` or `TextDomain` (merge, scale, option, decode ...).

    Raises:
        ConfigError: something is missing or does not go together. EnvError, EngineError, RewardError: see the worlds.
    """
    if budget is None:
        raise ConfigError("search: give a budget, such as Budget(simulations=100)")
    made = SearchResult(Search(make_domain(roots, policy, world, critic, **settings), config))
    return made.run(budget, progress=progress)


def make_domain(roots: Sequence[Any], policy: Any, world: Any, critic: Any = None, **settings: Any) -> Domain:
    """The world of a search from what `search` takes."""
    if hasattr(world, "extend"):
        if policy is not None:
            raise ConfigError("search over text: the engine is the policy; give policy=None")
        engine: Engine = world
        return TextDomain(engine, roots, critic, **settings)
    if hasattr(world, "roots") and hasattr(world, "actions"):
        model: ArrayModel = world
        if policy is not None or critic is not None or len(roots):
            raise ConfigError(
                "search over an array model: it has its own roots, priors and values; give [], None, None"
            )
        return ArrayDomain(model, **settings)
    if not callable(world):
        raise ConfigError(
            f"world: {type(world).__name__} is no factory of environments, no engine and no array model; give a class "
            "or a function that makes an environment"
        )
    if policy is None:
        raise ConfigError("search over environments: give a policy, such as LegalActions()")
    named = [r if isinstance(r, EnvRoot) else EnvRoot(task=r) for r in roots]
    factory: Callable[[], Any] = world
    return EnvDomain(factory, named, policy, critic, **settings)


def load(
    path: str | Path, policy: Any, world: Any, critic: Any = None, *, roots: Sequence[Any] = (), **settings: Any
) -> SearchResult:
    """A saved search, ready to go on with `run`; with the same helpers it ends as an unbroken one would.

    Args:
        path: what `save` wrote. policy, world, critic, settings: as the search was made with.
        roots: of a search over environments, as it was made with (of text they are in the file).

    Raises:
        DataError: the file is damaged, no search, or of another version. EnvError: the environments answer otherwise.
    """
    header, arrays = _read(Path(path))
    try:
        trees = {
            name: {
                k.removeprefix(f"tokens/{number}/"): v for k, v in arrays.items() if k.startswith(f"tokens/{number}/")
            }
            for name, number in header["token_trees"].items()
        }
        text = header["kind"] == "text"
        if text:
            roots = [TokenTree.from_arrays(trees[name]) for name in header["names"]]
        domain = make_domain(roots, policy, world, critic, **settings)
        if domain.names != header["names"] or list(domain.columns) != header["columns"]:
            raise DataError(
                f"{path}: holds the trees {header['names'][:5]} with parts {header['columns']}, but {domain.names[:5]} "
                f"with {list(domain.columns)} were given; give the roots and the critic that it was made with"
            )
        config = settings_config(header["config"])
        found = Search(domain, config)
        found.forest.from_arrays({k.removeprefix("forest/"): v for k, v in arrays.items() if k.startswith("forest/")})
        if isinstance(domain, TextDomain):
            domain.from_json(header["world"], found.forest)
        elif isinstance(domain, EnvDomain):
            domain.from_json(header["world"])
            restore = getattr(domain.policy, "from_arrays", None)
            if restore is not None:
                restore(trees)
        found.restore(header)  # last: putting environments into their states is not part of the search's accounts
    except (KeyError, TypeError, ValueError, IndexError) as err:
        if isinstance(err, DataError | ConfigError):
            raise
        raise DataError(f"{path}: is no whole search tree file ({type(err).__name__}: {err}); search again") from err
    return SearchResult(found)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    try:
        data = path.read_bytes()
    except OSError as err:
        raise DataError(f"{path}: cannot be read: {err.strerror}") from None
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        header = from_json(arrays.pop("header").tobytes().decode())
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as err:
        raise DataError(f"{path}: the search tree file is damaged ({err}); search again or use a copy") from None
    if not isinstance(header, dict) or "schema" not in header:
        raise DataError(f"{path}: is a NumPy archive, but holds no search")
    if header["schema"] != SCHEMA:
        raise DataError(f"{path}: has version {header['schema']}, this package reads {SCHEMA}; update the package")
    return header, arrays


# -- settings as JSON --------------------------------------------------------------------------------------------------


def _settings(config: SearchConfig) -> dict[str, Any]:
    out = to_dict(config)
    for name in ("select", "backup", "width", "noise"):
        value = getattr(config, name)
        if value is not None:
            out[name] = {"rule": type(value).__name__, **to_dict(value)}
    return out


def settings_config(stored: dict[str, Any]) -> SearchConfig:
    """The settings of a saved search.

    Raises:
        ValueError: an unknown rule.
    """
    from forethought.search import rules

    known = {c.__name__: c for c in (*rules.Selection.__args__, *rules.Backup.__args__, *rules.Width.__args__)}  # type: ignore[attr-defined]
    known["Noise"] = rules.Noise
    out = dict(stored)
    for name in ("select", "backup", "width", "noise"):
        if out[name] is not None:
            values = dict(out[name])
            rule = values.pop("rule")
            if rule not in known:
                raise ValueError(f"unknown rule {rule!r}")
            out[name] = known[rule](**values)
    return SearchConfig(**out)
