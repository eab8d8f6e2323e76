"""The same small problems in mctx (PUCT) and open_spiel (UCT): the same trees. Skipped without them.

pip install mctx jax open_spiel
"""

import numpy as np
import pytest
from games import HashGame
from worlds import LINES

from forethought.search.arrays import ArrayDomain, ArrayStep
from forethought.search.mcts import Budget, Search, SearchConfig
from forethought.search.rules import PUCT, UCT

MUZERO = PUCT(c=1.25, c_base=19652, count="node", unvisited="lowest", normalise="siblings")


def of_mctx(game, simulations, gamma):
    mctx, jax = pytest.importorskip("mctx"), pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    jnp = jax.numpy
    u = jnp.uint64

    def mix(x):
        x = x + u(0x9E3779B97F4A7C15)
        x = (x ^ (x >> u(30))) * u(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> u(27))) * u(0x94D049BB133111EB)
        return x ^ (x >> u(31))

    def read(states):
        value = ((states >> u(40)) & u(255)).astype(jnp.float64) / 128 - 1
        shifts = (8 + game.bits * jnp.arange(game.actions)).astype(jnp.uint64)
        bits = 1.0 + ((states[:, None] >> shifts) & u((1 << game.bits) - 1)).astype(jnp.float64)
        reward = ((states >> u(50)) & u(7)).astype(jnp.float64) / 8 - 0.5
        player = (states >> u(60)) % u(game.players)
        return jnp.log(bits / bits.sum(1, keepdims=True)), value, reward, player

    def step(params, key, action, before):
        states = mix(before + action.astype(jnp.uint64) + u(1))
        logits, value, reward, player = read(states)
        discount = jnp.where(player == read(before)[3], gamma, -gamma)
        return mctx.RecurrentFnOutput(reward=reward, discount=discount, prior_logits=logits, value=value), states

    roots = jnp.array(game.start, dtype=jnp.uint64)
    logits, value, _, _ = read(roots)
    root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=roots)
    out = mctx.muzero_policy({}, jax.random.PRNGKey(0), root, step, simulations, dirichlet_fraction=0.0)
    return out.search_tree


@pytest.mark.parametrize("players", [1, 2])
def test_puct_grows_the_tree_of_mctx(players):
    # Fine priors: mctx breaks ties, and all gaps below 1e-7, by chance.
    game = HashGame(range(20, 28), actions=4, players=players, end_share=0, bits=12)
    theirs = of_mctx(game, 100, 0.9)
    config = SearchConfig(select=MUZERO, gamma=0.9, count_root=True)
    search = Search(ArrayDomain(game), config)
    search.run(Budget(simulations=100))
    f = search.forest
    mine = f.to_arrays()
    n = mine["n"].shape[1]
    np.testing.assert_array_equal(mine["visits"][:, :, 0], np.asarray(theirs.node_visits)[:, :n])
    np.testing.assert_array_equal(mine["child"], np.asarray(theirs.children_index)[:, :n])
    np.testing.assert_array_equal(mine["n"], np.asarray(theirs.children_visits)[:, :n])
    seen = mine["n"] > 0
    q = np.asarray(theirs.children_rewards + theirs.children_discounts * theirs.children_values)[:, :n]
    np.testing.assert_allclose(mine["q"][seen], q[seen], atol=1e-5)
    value = mine["total"][:, :, 0] / np.maximum(mine["visits"][:, :, 0], 1)
    np.testing.assert_allclose(value, np.asarray(theirs.node_values)[:, :n], atol=1e-5)


class Board:
    """Tic-tac-toe as an array model; the value of an open board is a number made of its fields."""

    actions = 9

    def roots(self):
        return self._step([np.zeros(9, int)])

    def step(self, states, actions):
        boards = []
        for board, action in zip(states, actions, strict=True):
            board = board.copy()
            board[action] = 1 + (board > 0).sum() % 2
            boards.append(board)
        return self._step(boards)

    def _step(self, boards):
        boards = np.array(boards)
        won = np.array([any(b[x] == b[y] == b[z] != 0 for x, y, z in LINES) for b in boards])
        ended = won | (boards > 0).all(1)
        value = np.where(ended, np.where(won, -1.0, 0.0), [guess(b) for b in boards])  # the mover before has won
        free = boards == 0
        return ArrayStep(boards, value, prior=free / np.maximum(free.sum(1, keepdims=True), 1), ended=ended,
                         player=(boards > 0).sum(1) % 2)  # fmt: skip


def guess(board):
    """In [-1, 1], for the player to move; eighths, so that sums are exact."""
    return (int((board * np.arange(1, 10) * 7).sum()) % 17 - 8) / 8


class LegalUCT(UCT):
    """Illegal moves have prior 0 here; open_spiel lists legal ones only."""

    def scores(self, forest, rows):
        return np.where(forest.prior[rows] > 0, super().scores(forest, rows), -np.inf)


def test_uct_grows_the_tree_of_open_spiel():
    pyspiel = pytest.importorskip("pyspiel")
    mcts = pytest.importorskip("open_spiel.python.algorithms.mcts")

    def board_of(state):
        return np.array([{".": 0, "x": 1, "o": 2}[c] for c in str(state).replace("\n", "")])

    class Evaluator(mcts.Evaluator):
        def evaluate(self, state):
            board = board_of(state)
            value = guess(board)
            mover = (board > 0).sum() % 2
            return np.array([value, -value] if mover == 0 else [-value, value])

        def prior(self, state):
            legal = state.legal_actions()
            return [(a, 1 / len(legal)) for a in legal]

    class Still:
        """No shuffling: moves in the order of the fields."""

        def shuffle(self, items):
            pass

    game = pyspiel.load_game("tic_tac_toe")
    bot = mcts.MCTSBot(game, 1.4, 300, Evaluator(), solve=False, random_state=Still(),
                       child_selection_fn=mcts.SearchNode.uct_value)  # fmt: skip
    theirs = bot.mcts_search(game.new_initial_state())
    # Their first simulation evaluates the root.
    search = Search(ArrayDomain(Board()), SearchConfig(select=LegalUCT(c=1.4, factor=1.0), count_root=True))
    search.run(Budget(simulations=299))
    f = search.forest

    def compare(row, node):
        assert node.explore_count == (f.visits[row] if node is theirs else f.n[f.parent[row], f.slot[row]])
        for child in node.children:
            slot = child.action
            assert child.explore_count == f.n[row, slot]
            assert child.total_reward == pytest.approx(f.w[row, slot], abs=1e-9)
            if f.child[row, slot] >= 0 and child.children:
                compare(int(f.child[row, slot]), child)

    compare(0, theirs)
    assert theirs.explore_count == 300 and f.size[0] > 150
