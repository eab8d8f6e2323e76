"""The default engine: batched sampling from a transformers model in plain torch.

- Each distinct prefix token is prefilled once (packed as trees) and its keys and values are stored once per leaf.
- Decoding runs in lanes: a lane is one leaf, its slots are samples of that leaf. Keys of the shared prefix stand once
  per lane, so eight samples of one prompt read it once.
- A slot whose row ends takes the leaf's next sample; a lane whose leaf is done takes the next leaf. When nothing waits
  and half of the slots are idle, the batch shrinks.
- A row draws one uniform number a token from a generator seeded by (run seed, task, node, sample index), so its sample
  does not depend on its neighbours beyond float error.

Shapes: G lanes, W slots a lane, R = G*W rows, H heads, K key-value heads, d head size, P prefix and S own columns.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from forethought.errors import EngineError
from forethought.models import attention
from forethought.models.engine import EngineStats, Leaf, Sampling, row_seed
from forethought.models.policy import Policy
from forethought.models.prefix_cache import KV, PrefixCache, prefill_ends
from forethought.tree.pack import pack
from forethought.tree.tree import Kind, Stop, TokenTree


def sample(logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [R] and their log-probs [R] from float32 logits [R, V] and one uniform number in [0, 1) a row.

    Draws by inverting the cumulative distribution; see `Sampling` for which log-prob is returned.
    """
    if sampling.temperature == 0:
        ids = logits.argmax(-1)
        return ids, logits.gather(1, ids[:, None])[:, 0] - logits.logsumexp(-1)
    scaled = logits / sampling.temperature if sampling.temperature != 1 else logits
    norm = scaled.logsumexp(-1, keepdim=True)
    probs = (scaled - norm).exp_()
    if sampling.top_k and sampling.top_k < probs.shape[-1]:
        best, where = probs.topk(sampling.top_k, -1)
        probs = torch.zeros_like(probs).scatter_(1, where, best)
    if sampling.top_p < 1:
        ordered, where = probs.sort(dim=-1, descending=True, stable=True)
        # The smallest head whose mass reaches top_p: a token stays while the mass before it is still short of it.
        ordered[ordered.cumsum(-1) - ordered >= sampling.top_p * probs.sum(-1, keepdim=True)] = 0
        probs = torch.zeros_like(probs).scatter_(1, where, ordered)
    mass = probs.cumsum_(-1)
    ids = torch.searchsorted(mass, uniforms[:, None] * mass[:, -1:], right=True).clamp_max_(mass.shape[-1] - 1)
    source, lse = (scaled, norm) if sampling.logprobs == "tempered" else (logits, logits.logsumexp(-1, keepdim=True))
    return ids[:, 0], (source.gather(1, ids) - lse)[:, 0]


class LaneContext:
    """Keys and values of G lanes x W slots, and the attention of one decode step over them.

    All rows write column `t` of the own buffer; `first` [G, W] says at which column a row began, so that a slot can
    be handed to a new row at any step.
    """

    def __init__(self, lanes: int, slots: int, columns: int, device: torch.device):
        self.G, self.W, self.columns, self.device = lanes, slots, columns, device
        self.t = 0
        self.prefix_len = torch.zeros(lanes, dtype=torch.long, device=device)
        self.first = torch.zeros(lanes, slots, dtype=torch.long, device=device)
        self.prefix: dict[int, list[torch.Tensor]] = {}  # layer -> [k, v], each [G, K, P, d]
        self.own: dict[int, list[torch.Tensor]] = {}  # layer -> [k, v], each [G, K, W, S, d]
        self._masks: dict[int | None, torch.Tensor] = {}

    def load(self, lane: int, keys: dict[int, torch.Tensor], values: dict[int, torch.Tensor]) -> None:
        """Put a prefix ([K, P, d] per layer) into a lane."""
        length = next(iter(keys.values())).shape[1]
        for layer in keys:
            for which, new in enumerate((keys[layer], values[layer])):
                kv_heads, _, size = new.shape
                if layer not in self.prefix:
                    self.prefix[layer] = [new.new_zeros(self.G, kv_heads, length, size) for _ in range(2)]
                    self.own[layer] = [new.new_zeros(self.G, kv_heads, self.W, self.columns, size) for _ in range(2)]
                buffer = self.prefix[layer][which]
                if buffer.shape[2] < length:
                    grown = buffer.new_zeros(self.G, kv_heads, length, size)
                    grown[:, :, : buffer.shape[2]] = buffer
                    self.prefix[layer][which] = buffer = grown
                buffer[lane, :, :length] = new
        self.prefix_len[lane] = length

    def open(self, lane: int, slot: int) -> None:
        """A new row begins in this slot at the next column."""
        self.first[lane, slot] = self.t

    def step(self) -> None:
        """Make room for one more column and forget the last step's masks."""
        self._masks.clear()
        if self.t == self.columns:
            drop = int(self.first.min())
            grow = max(0, max(1, self.columns // 2) - drop)
            for pair in self.own.values():
                for which, buffer in enumerate(pair):
                    kept = buffer[:, :, :, drop:]
                    pair[which] = torch.cat([kept, kept.new_zeros(*kept.shape[:3], drop + grow, kept.shape[-1])], 3)
            self.first -= drop
            self.t -= drop
            self.columns += grow

    def shrink(self, lanes: list[int], slots: list[list[int]]) -> None:
        """Keep only these lanes and, per lane, these slots (equally many)."""
        lane = torch.tensor(lanes, device=self.device)
        slot = torch.tensor(slots, device=self.device)
        longest = int(self.prefix_len[lane].max())
        for pair in self.prefix.values():
            pair[:] = [buffer[lane, :, :longest].contiguous() for buffer in pair]
        for pair in self.own.values():
            pair[:] = [buffer.transpose(1, 2)[lane[:, None], slot].transpose(1, 2).contiguous() for buffer in pair]
        self.prefix_len = self.prefix_len[lane]
        self.first = self.first[lane[:, None], slot]
        self.G, self.W = len(lanes), len(slots[0])

    def columns_of(self, lane: int, slot: int) -> dict[int, KV]:
        """Copies of the keys and values of the tokens that the slot's row has been fed, per layer."""
        begin = int(self.first[lane, slot])
        return {
            n: (k[lane, :, slot, begin : self.t].clone(), v[lane, :, slot, begin : self.t].clone())
            for n, (k, v) in self.own.items()
        }

    def _mask(self, window: int | None) -> torch.Tensor:
        """Additive float32 mask [G, 1, W, 1, P + S] of this step."""
        if window not in self._masks:
            prefix = next(iter(self.prefix.values()))[0].shape[2]
            column = torch.arange(self.t + 1, device=self.device)
            place = torch.arange(prefix, device=self.device)
            seen_prefix = (place < self.prefix_len[:, None])[:, None].expand(-1, self.W, -1)
            seen_own = column >= self.first[:, :, None]
            if window is not None:
                now = self.prefix_len[:, None] + self.t - self.first
                seen_prefix = seen_prefix & (now[:, :, None] - place < window)
                seen_own = seen_own & (self.t - column < window)
            seen = torch.cat([seen_prefix, seen_own], -1)
            mask = torch.zeros(seen.shape, device=self.device).masked_fill_(~seen, torch.finfo(torch.float32).min)
            self._masks[window] = mask[:, None, :, None]
        return self._masks[window]

    def attend(self, layer, q, k, v, *, scaling, window, softcap) -> torch.Tensor:
        G, W, t = self.G, self.W, self.t
        K, size = k.shape[1], q.shape[-1]
        rep = q.shape[1] // K
        prefix_k, prefix_v = self.prefix[layer]
        own_k, own_v = self.own[layer]
        own_k[:, :, :, t] = k.view(G, W, K, size).transpose(1, 2)
        own_v[:, :, :, t] = v.view(G, W, K, size).transpose(1, 2)
        query = (q * scaling).view(G, W, K, rep, size).transpose(1, 2).reshape(G * K, W * rep, size)
        P = prefix_k.shape[2]
        scores = torch.empty(G, K, W, rep, P + t + 1, dtype=torch.float32, device=q.device)
        scores[..., :P] = torch.bmm(query, prefix_k.view(G * K, P, size).transpose(1, 2)).view(G, K, W, rep, P)
        keys = own_k.view(G * K * W, self.columns, size)[:, : t + 1]
        values = own_v.view(G * K * W, self.columns, size)[:, : t + 1]
        scores[..., P:] = torch.bmm(query.view(G * K * W, rep, size), keys.transpose(1, 2)).view(G, K, W, rep, t + 1)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores += self._mask(window)
        probs = scores.softmax(-1).to(v.dtype)
        out = torch.bmm(probs[..., :P].reshape(G * K, W * rep, P), prefix_v.view(G * K, P, size)).view(
            G, K, W, rep, size
        )
        out += torch.bmm(probs[..., P:].reshape(G * K * W, rep, t + 1), values).view(G, K, W, rep, size)
        return out.transpose(1, 2).reshape(G * W, 1, K * rep, size)


@dataclass
class _Row:
    """One sample in the making."""

    leaf: int  # index into the call's leaves
    limit: int
    draws: np.ndarray
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop: Stop = Stop.NONE
    kept: dict[int, KV] = field(default_factory=dict)  # of all tokens but the last, where a cache wants them


@dataclass
class _Prefix:
    """A prefilled leaf: keys and values [K, P, d] per layer and the logits [V] that its first token is drawn from."""

    keys: dict[int, torch.Tensor]
    values: dict[int, torch.Tensor]
    logits: torch.Tensor


class TorchEngine:
    """Samples from a `Policy`; shares its weights, so a trained policy is sampled without copying.

    Args:
        policy: model and tokenizer. Its layout must be "tree".
        max_rows: rows decoded together.
        prefill_tokens: tokens prefilled in one forward.
    """

    trainable = True

    def __init__(self, policy: Policy, *, max_rows: int = 64, prefill_tokens: int = 4096):
        if policy.layout != "tree":
            raise EngineError(
                f"{type(policy.core).__name__} cannot route its attention, which this engine needs for shared prefixes"
            )
        if max_rows < 1 or prefill_tokens < 1:
            raise EngineError(f"max_rows={max_rows}, prefill_tokens={prefill_tokens}: both must be at least 1")
        self.policy = policy
        self.max_rows = max_rows
        self.prefill_tokens = prefill_tokens
        self.stats = EngineStats()
        self.cache: PrefixCache | None = None

    def load_weights(self, state: dict) -> None:
        self.policy.model.load_state_dict(state)
        if self.cache is not None:
            self.cache.clear()

    @contextmanager
    def reuse(self, max_tokens: int = 65_536) -> Iterator[None]:
        """Keep keys and values between the calls of this block: each token of a tree is prefilled or decoded once.

        The model's weights must not change inside (but `load_weights` forgets what was kept). Blocks may be nested; the
        outermost one counts.

        Args:
            max_tokens: tokens kept at most, whole trees at a time. A token takes 2 * layers * key-value width numbers:
                46 kB in SmolLM2-135M in float32.
        """
        if self.cache is not None:
            yield
            return
        self.cache = PrefixCache(max_tokens)
        try:
            yield
        finally:
            self.cache = None

    @torch.inference_mode()
    def extend(
        self,
        leaves: Sequence[Leaf],
        n: int,
        sampling: Sampling,
        *,
        names: Sequence[str] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[list[int]]:
        """See `engine.Engine.extend`.

        Raises:
            EngineError: n < 1, not one name a leaf, or a leaf whose path has no token to predict from.
        """
        if n < 1:
            raise EngineError(f"n={n}: sample at least one continuation")
        if names is not None and len(names) != len(leaves):
            raise EngineError(f"{len(names)} names for {len(leaves)} leaves: give one each")
        training = self.policy.model.training
        self.policy.model.eval()
        try:
            rows = _Call(self, leaves, n, sampling, names, progress).run()
        finally:
            self.policy.model.train(training)
        out: list[list[int]] = []
        for (tree, leaf), mine in zip(leaves, rows, strict=True):
            out.append([])
            for row in mine:
                self.stats.tokens_generated += len(row.ids)
                out[-1].append(
                    tree.add(leaf, row.ids, kind=Kind.ASSISTANT, sampled=True, logprobs=row.logprobs, stop=row.stop)
                )
                if self.cache is not None and row.kept:
                    start = int(tree.start[out[-1][-1]])
                    self.cache.put(tree, np.arange(start, start + len(row.ids) - 1), row.kept)
        if self.cache is not None:
            self.cache.trim()
        self.stats.requests += len(leaves) * n
        return out

    @torch.inference_mode()
    def score(self, leaves: Sequence[Leaf], *, temperature: float = 1.0) -> list[np.ndarray]:
        """See `engine.Engine.score`."""
        trees: list[TokenTree] = []
        where: dict[int, int] = {}
        for tree, _ in leaves:
            if id(tree) not in where:
                where[id(tree)] = len(trees)
                trees.append(tree)
        weights = [np.zeros(t.n_tokens, np.float32) for t in trees]
        for tree, leaf in leaves:
            weights[where[id(tree)]][tree.path_tokens(leaf)[1:]] = 1
        found = [np.full(t.n_tokens, np.nan, np.float32) for t in trees]
        training = self.policy.model.training
        self.policy.model.eval()
        try:
            for batch in pack(trees, weights=weights, max_tokens=None):
                moved = batch.to(self.policy.device)
                values = self.policy.logprobs(moved, temperature=temperature)[0].float().cpu().numpy()
                for i in range(len(trees)):
                    mine = batch.tree.numpy() == i
                    found[i][batch.token.numpy()[mine]] = values[mine]
                self.stats.tokens_scored += batch.n_targets
        finally:
            self.policy.model.train(training)
        return [found[where[id(tree)]][tree.path_tokens(leaf)] for tree, leaf in leaves]

    def new_tokens(self, tree: TokenTree, leaf: int) -> int:
        """Tokens on the path to a leaf that a prefill would run."""
        if self.cache is None:
            return tree.path_length(leaf)
        tokens = tree.path_tokens(leaf)
        return len(tokens) - self.cache.known(tree, tokens)

    def prefill(self, leaves: Sequence[Leaf]) -> list[_Prefix]:
        """Keys, values and next-token logits per leaf; each token that is not kept from earlier calls is run once."""
        if self.cache is None:
            return self._prefill_all(leaves)
        tokens = [tree.path_tokens(leaf) for tree, leaf in leaves]
        known = [self.cache.known(tree, t) for (tree, _), t in zip(leaves, tokens, strict=True)]
        cold = [i for i, n in enumerate(known) if not n]
        out: dict[int, _Prefix] = {}
        if cold:
            for i, prefix in zip(cold, self._prefill_all([leaves[i] for i in cold]), strict=True):
                out[i] = prefix
                self.cache.put(leaves[i][0], tokens[i], {n: (k, prefix.values[n]) for n, k in prefix.keys.items()})
        first: dict[tuple[int, int], int] = {}  # a leaf that stands in the call twice is run once
        for i, (tree, leaf) in enumerate(leaves):
            if known[i]:
                first.setdefault((id(tree), leaf), i)
        warm = list(first.values())
        if warm:
            ends = prefill_ends(
                self.policy, self.cache, self.stats, [(leaves[i][0], tokens[i], known[i]) for i in warm]
            )
            out |= {i: _Prefix(*end) for i, end in zip(warm, ends, strict=True)}
        return [out[i] if i in out else out[first[id(t), leaf]] for i, (t, leaf) in enumerate(leaves)]

    def _prefill_all(self, leaves: Sequence[Leaf]) -> list[_Prefix]:
        """Run each distinct token on the paths once."""
        trees: list[TokenTree] = []
        where: dict[int, int] = {}
        ends: list[set[int]] = []
        for tree, leaf in leaves:
            if id(tree) not in where:
                where[id(tree)] = len(trees)
                trees.append(tree)
                ends.append(set())
            ends[where[id(tree)]].add(leaf)
        none = [np.zeros(t.n_tokens, np.float32) for t in trees]
        (batch,) = pack(trees, keep=ends, weights=none)
        batch = batch.to(self.policy.device)
        context = attention.TreeContext(batch, capture=True)
        hidden = self.policy.hidden(batch, context=context)
        assert context.keys is not None and context.values is not None
        self.stats.tokens_prefilled += batch.n_tokens
        paths = []
        for tree, leaf in leaves:
            spans = [batch.places[(where[id(tree)], node)] for node in tree.path(leaf)]
            paths.append(torch.cat([torch.arange(a, b) for a, b in spans]).to(self.policy.device))
        logits = self.policy.logits(hidden.index_select(0, torch.stack([p[-1] for p in paths])))
        return [
            _Prefix(
                {layer: k.index_select(1, path) for layer, k in context.keys.items()},
                {layer: v.index_select(1, path) for layer, v in context.values.items()},
                logits[i],
            )
            for i, path in enumerate(paths)
        ]


class _Call:
    """One `extend`: the queue of rows, the lanes and the decode loop."""

    def __init__(self, engine: TorchEngine, leaves: Sequence[Leaf], n: int, sampling: Sampling, names, progress):
        self.engine, self.policy, self.leaves = engine, engine.policy, leaves
        self.sampling, self.progress = sampling, progress
        self.device = self.policy.device
        self.rows: list[list[_Row]] = []
        repeated: Counter[tuple[int, int]] = Counter()
        for number, (tree, leaf) in enumerate(leaves):
            length = tree.path_length(leaf)
            if length == 0:
                raise EngineError(
                    f"leaf {number} (task {tree.task!r}) has an empty path: there is nothing to predict from; begin "
                    "the prompt with a beginning token"
                )
            begin = len(tree.children(leaf)) + repeated[id(tree), leaf] * n
            repeated[id(tree), leaf] += 1
            limit = min(sampling.max_tokens, self.policy.context - length)
            task, node, first = (tree.task, leaf, begin) if names is None else (names[number], 0, 0)
            self.rows.append([self._row(number, (task, node, first + i), limit) for i in range(n)])
        self.total = len(leaves) * n
        self.done = 0
        self.queue = deque(deque(r for r in mine if r.limit > 0) for mine in self.rows)
        self.queue = deque(q for q in self.queue if q)
        self.ready: dict[int, _Prefix] = {}
        self.eos = set() if sampling.ignore_eos else set(self.policy.eos_ids)
        # A token carries at least one byte of text, so this tail always holds a stop string that just ended.
        self.tail = max((len(s.encode()) for s in sampling.stop), default=0) + 2

    def _row(self, number: int, key: tuple[str, int, int], limit: int) -> _Row:
        """`key`: see `row_seed`."""
        draws = np.zeros(0)
        if self.sampling.temperature > 0 and limit > 0:
            generator = np.random.Generator(np.random.Philox(row_seed(self.sampling.seed, *key)))
            draws = generator.random(limit)
        return _Row(number, limit, draws, stop=Stop.LENGTH if limit <= 0 else Stop.NONE)

    def run(self) -> list[list[_Row]]:
        self.done = self.total - sum(len(q) for q in self.queue)
        if not self.queue:
            return self.rows
        slots = min(max(len(q) for q in self.queue), self.engine.max_rows)
        lanes = min(len(self.queue), max(1, self.engine.max_rows // slots))
        columns = max(len(q) and q[0].limit for q in self.queue)
        self.context = LaneContext(lanes, slots, columns, self.device)
        self.lane_queue: list[deque[_Row]] = [deque() for _ in range(lanes)]
        self.slots: list[list[_Row | None]] = [[None] * slots for _ in range(lanes)]
        self.lane_logits: list[torch.Tensor] = [torch.empty(0)] * lanes
        self.length = np.zeros(lanes, np.int64)  # prefix tokens of each lane
        self._fill(range(lanes))
        self._refill()
        while any(row is not None for lane in self.slots for row in lane):
            self._shrink()
            logits = self._forward()
            self._take(logits, [(g, w, row) for g, lane in enumerate(self.slots) for w, row in enumerate(lane) if row])
            self._refill()
        return self.rows

    # -- putting rows into slots --
    def _prefetch(self, want: int) -> None:
        """Prefill the next leaves of the queue: at least `want`, within the token budget."""
        todo: list[int] = []
        tokens = 0
        for position, waiting in enumerate(self.queue):
            number = waiting[0].leaf
            if number in self.ready:
                continue
            size = self.engine.new_tokens(*self.leaves[number])
            if todo and (tokens + size > self.engine.prefill_tokens or position >= max(want, 8)):
                break
            todo.append(number)
            tokens += size
        if todo:
            for number, prefix in zip(todo, self.engine.prefill([self.leaves[i] for i in todo]), strict=True):
                self.ready[number] = prefix

    def _fill(self, lanes) -> None:
        """Give idle lanes the next leaves, and sample the first token of their rows."""
        started: list[tuple[int, int, _Row]] = []
        logits: list[torch.Tensor] = []
        idle = list(lanes)
        for place, lane in enumerate(idle):
            if not self.queue:
                break
            if self.queue[0][0].leaf not in self.ready:
                self._prefetch(len(idle) - place)
            waiting = self.queue.popleft()
            prefix = self.ready.pop(waiting[0].leaf)
            self.context.load(lane, prefix.keys, prefix.values)
            tree, leaf = self.leaves[waiting[0].leaf]
            self.length[lane] = tree.path_length(leaf)
            self.lane_queue[lane] = waiting
            self.lane_logits[lane] = prefix.logits
            for slot in range(self.context.W):
                if waiting:
                    started.append((lane, slot, waiting.popleft()))
                    logits.append(prefix.logits)
        self._start(started, logits)

    def _start(self, started: list[tuple[int, int, _Row]], logits: list[torch.Tensor]) -> None:
        for lane, slot, row in started:
            self.slots[lane][slot] = row
            self.context.open(lane, slot)
        if started:
            self._take(torch.stack(logits), started)

    def _refill(self) -> None:
        again = True
        while again:  # a row may end with its first token
            again = False
            started: list[tuple[int, int, _Row]] = []
            logits: list[torch.Tensor] = []
            for lane, rows in enumerate(self.slots):
                for slot, row in enumerate(rows):
                    if row is None and self.lane_queue[lane]:
                        started.append((lane, slot, self.lane_queue[lane].popleft()))
                        logits.append(self.lane_logits[lane])
            self._start(started, logits)
            idle = [g for g, rows in enumerate(self.slots) if not any(rows) and not self.lane_queue[g]]
            if idle and self.queue:
                self._fill(idle)
                again = True
            again = again or bool(started)

    def _shrink(self) -> None:
        alive = [[w for w, row in enumerate(rows) if row] for rows in self.slots]
        busy = [g for g, mine in enumerate(alive) if mine or self.lane_queue[g]]
        if self.queue or any(self.lane_queue[g] for g in busy):
            return
        widest = max(len(alive[g]) for g in busy)
        if 2 * len(busy) * widest > self.context.G * self.context.W:
            return
        slots = [(alive[g] + [w for w in range(self.context.W) if w not in alive[g]])[:widest] for g in busy]
        self.context.shrink(busy, slots)
        self.slots = [[self.slots[g][w] for w in mine] for g, mine in zip(busy, slots, strict=True)]
        self.lane_queue = [self.lane_queue[g] for g in busy]
        self.lane_logits = [self.lane_logits[g] for g in busy]
        self.length = self.length[busy]

    # -- one step --
    def _forward(self) -> torch.Tensor:
        """Feed each row's last token; logits [G*W, V]."""
        self.context.step()
        last = [[row.ids[-1] if row else 0 for row in lane] for lane in self.slots]
        place = [
            [int(self.length[g]) + len(row.ids) - 1 if row else 0 for row in lane] for g, lane in enumerate(self.slots)
        ]
        ids = torch.tensor(last, device=self.device).view(-1, 1)
        positions = torch.tensor(place, device=self.device).view(-1, 1)
        with attention.using(self.policy.configs, self.context):
            out = self.policy.decoder(input_ids=ids, position_ids=positions, use_cache=False)
        self.context.t += 1
        self.engine.stats.decode_steps += 1
        return self.policy.logits(out.last_hidden_state[:, 0])

    def _take(self, logits: torch.Tensor, rows: list[tuple[int, int, _Row]]) -> None:
        """Sample one token for each of these rows; logits are theirs, or those of all slots in slot order."""
        if len(logits) != len(rows):
            logits = logits[torch.tensor([g * self.context.W + w for g, w, _ in rows], device=self.device)]
        greedy = self.sampling.temperature == 0
        draws = [0.0 if greedy else row.draws[len(row.ids)] for _, _, row in rows]
        ids, logprobs = sample(logits, torch.tensor(draws, dtype=torch.float32, device=self.device), self.sampling)
        for (g, w, row), token, logprob in zip(rows, ids.tolist(), logprobs.tolist(), strict=True):
            row.ids.append(token)
            row.logprobs.append(logprob)
            row.stop = self._ended(row)
            if row.stop != Stop.NONE:
                if self.engine.cache is not None and len(row.ids) > 1:
                    row.kept = self.context.columns_of(g, w)
                self.slots[g][w] = None
                self.context.open(g, w)  # an idle slot holds no columns back
                self.done += 1
        if self.progress:
            self.progress(self.done, self.total)

    def _ended(self, row: _Row) -> Stop:
        if row.ids[-1] in self.eos:
            return Stop.EOS
        if self.sampling.stop:
            text = self.policy.tokenizer.decode(row.ids[-self.tail :])
            if any(s in text for s in self.sampling.stop):
                return Stop.STRING
        return Stop.LENGTH if len(row.ids) >= row.limit else Stop.NONE
