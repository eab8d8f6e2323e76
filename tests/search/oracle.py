"""The reference: a plain, sequential search with one object a node. Slow, short, and what the fast one must equal."""

from __future__ import annotations

import math

from forethought.search.rules import UCT, MaxBackup, ProgressiveWidth, SoftBackup


class Node:
    __slots__ = ("edges", "ended", "own", "player", "raw", "state", "total", "visits")

    def __init__(self, facts: dict):
        self.state, self.raw, self.ended = facts["state"], facts["value"], facts["ended"]
        self.player = facts["player"]
        self.edges = [] if self.ended else [Edge(p) for p in facts["prior"]]
        self.visits = self.own = self.total = 0


class Edge:
    __slots__ = ("child", "n", "prior", "q", "reward", "sign", "w")

    def __init__(self, prior: float):
        self.prior, self.child = prior, None
        self.n = self.w = self.q = 0
        self.reward = self.sign = 0.0


class Oracle:
    """`game` has `read(state)` and `step_one(state, action)`, both -> dict; `config` is a SearchConfig with leaves=1."""

    def __init__(self, game, root: int, config):
        self.game, self.config = game, config
        self.root = Node(game.read(root))
        self.nodes = [self.root]
        self.lowest, self.highest = math.inf, -math.inf
        if config.count_root:
            self.root.visits = self.root.own = 1
            self.root.total = self.root.raw

    def value(self, node: Node) -> float:
        backup = self.config.backup
        seen = [e for e in node.edges if e.n]
        if isinstance(backup, MaxBackup):
            return max((e.q for e in seen), default=node.raw)
        if isinstance(backup, SoftBackup):
            if not seen:
                return node.raw
            top = max(e.q for e in seen)
            mass = sum(e.prior for e in seen)
            powers = sum(e.prior * math.exp((e.q - top) / backup.temperature) for e in seen)
            return top + backup.temperature * math.log(powers / mass)
        return node.total / node.visits if node.visits else node.raw

    def scaled(self, node: Node) -> list[float]:
        rule = self.config.select
        if isinstance(rule, UCT):
            rest = math.inf
        else:
            rest = rule.unvisited
        if rule.normalise == "none" and not isinstance(rest, str):
            return [e.q if e.n else rest for e in node.edges]
        value = self.value(node)
        seen = [e.q for e in node.edges if e.n]
        low, high = min([value, *seen]), max([value, *seen])
        offset, scale = 0.0, 1.0
        if rule.normalise == "siblings":
            offset, scale = low, max(high - low, 1e-8)
        elif rule.normalise == "tree" and self.highest > self.lowest:
            offset, scale = self.lowest, self.highest - self.lowest
        fill = {"parent": value, "lowest": low}.get(rest)
        return [
            (e.q - offset) / scale if e.n else rest if fill is None else (fill - offset) / scale for e in node.edges
        ]

    def choose(self, node: Node) -> int:
        rule, width = self.config.select, self.config.width
        total = node.visits if rule.count == "node" else node.visits - node.own
        allowed = len(node.edges)
        if isinstance(width, ProgressiveWidth):
            allowed = min(max(math.ceil(width.factor * node.visits**width.power), width.least), width.most)
        best, best_score = -1, -math.inf
        if isinstance(rule, UCT):
            log = rule.factor * (math.log(total) if total else 0.0)
        else:
            c = rule.c
            if rule.c_base is not None:
                c += math.log((total + rule.c_base + 1) / rule.c_base)
            weight = c * math.sqrt(max(total, 1))
        for slot, (edge, q) in enumerate(zip(node.edges, self.scaled(node), strict=True)):
            if slot >= allowed:
                break
            if isinstance(rule, UCT):
                score = q if not edge.n else q + rule.c * math.sqrt(log / edge.n)
            else:
                score = weight * edge.prior / (1 + edge.n) + q
            if best < 0 or score > best_score:
                best, best_score = slot, score
        return best

    def simulate(self) -> None:
        config = self.config
        node, path = self.root, []
        while True:
            slot = self.choose(node) if node.edges else -1
            if slot < 0:
                leaf = node
                break
            edge = node.edges[slot]
            path.append((node, edge))
            if edge.child is None:
                facts = self.game.step_one(node.state, slot)
                if len(path) >= config.max_depth:
                    facts = facts | {"ended": True}
                leaf = edge.child = Node(facts)
                edge.reward = facts["reward"]
                edge.sign = config.gamma if leaf.player == node.player else -config.gamma
                self.nodes.append(leaf)
                break
            node = edge.child
        value = leaf.raw
        leaf.visits += 1
        leaf.own += 1
        leaf.total += value
        for node, edge in reversed(path):
            value = edge.reward + edge.sign * value
            edge.n += 1
            edge.w += value
            node.visits += 1
            node.total += value
            if isinstance(config.backup, MaxBackup | SoftBackup):
                edge.q = edge.reward + edge.sign * self.value(edge.child)
            else:
                edge.q = edge.w / edge.n
            self.lowest, self.highest = min(self.lowest, edge.q), max(self.highest, edge.q)

    def run(self, simulations: int) -> Oracle:
        for _ in range(simulations):
            self.simulate()
        return self
