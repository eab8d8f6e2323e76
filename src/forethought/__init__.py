"""Forethought: language-model agents that get better by imagining, searching and learning.

All public names stand here, and are loaded when they are first used: `import forethought` needs no torch. `credit`,
`losses` and `pair_losses` are modules of functions. What is not listed below may change.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from forethought.data import BatchSampler as BatchSampler
    from forethought.data import load_tasks as load_tasks
    from forethought.data import read_jsonl as read_jsonl
    from forethought.data import write_jsonl as write_jsonl
    from forethought.envs.check import check_env as check_env
    from forethought.envs.env import Env as Env
    from forethought.envs.env import Step as Step
    from forethought.envs.household import HouseholdEnv as HouseholdEnv
    from forethought.envs.problem import ProblemEnv as ProblemEnv
    from forethought.envs.registry import find_env as find_env
    from forethought.envs.sokoban import SokobanEnv as SokobanEnv
    from forethought.envs.world_model import WorldModel as WorldModel
    from forethought.envs.world_model import WorldModelEnv as WorldModelEnv
    from forethought.errors import ConfigError as ConfigError
    from forethought.errors import DataError as DataError
    from forethought.errors import EngineError as EngineError
    from forethought.errors import EnvError as EnvError
    from forethought.errors import ForethoughtError as ForethoughtError
    from forethought.errors import MissingExtraError as MissingExtraError
    from forethought.errors import ModelError as ModelError
    from forethought.errors import RewardError as RewardError
    from forethought.errors import RunError as RunError
    from forethought.evaluate.stats import bootstrap_ci as bootstrap_ci
    from forethought.evaluate.stats import paired_bootstrap as paired_bootstrap
    from forethought.evaluate.stats import pass_at_k as pass_at_k
    from forethought.evaluate.stats import wilson as wilson
    from forethought.evaluate.suites import EvalResult as EvalResult
    from forethought.evaluate.suites import evaluate as evaluate_tasks
    from forethought.learn import losses as losses
    from forethought.learn import pair_losses as pair_losses
    from forethought.learn.episode_trainer import EpisodeConfig as EpisodeConfig
    from forethought.learn.episode_trainer import EpisodeTrainer as EpisodeTrainer
    from forethought.learn.episodes import Episode as Episode
    from forethought.learn.episodes import EpisodeRules as EpisodeRules
    from forethought.learn.episodes import Players as Players
    from forethought.learn.learner import Learner as Learner
    from forethought.learn.learner import Targets as Targets
    from forethought.learn.offline import SFTConfig as SFTConfig
    from forethought.learn.offline import SFTTrainer as SFTTrainer
    from forethought.learn.online import OnlineConfig as OnlineConfig
    from forethought.learn.online import OnlineTrainer as OnlineTrainer
    from forethought.learn.optim import OptimConfig as OptimConfig
    from forethought.learn.pairs import PairConfig as PairConfig
    from forethought.learn.pairs import PairTrainer as PairTrainer
    from forethought.learn.pairs import PreferencePair as PreferencePair
    from forethought.learn.pairs import annotate as annotate_pairs
    from forethought.learn.pairs import usable_pairs as usable_pairs
    from forethought.learn.ppo import PartConfig as PartConfig
    from forethought.learn.ppo import PPOConfig as PPOConfig
    from forethought.learn.ppo import PPOTrainer as PPOTrainer
    from forethought.learn.preference_game import GameConfig as GameConfig
    from forethought.learn.preference_game import GameTrainer as GameTrainer
    from forethought.learn.session import fit as fit
    from forethought.models.chat import ChatRenderer as ChatRenderer
    from forethought.models.chat import preference_tree as preference_tree
    from forethought.models.chat import sft_tree as sft_tree
    from forethought.models.chat import sft_trees as sft_trees
    from forethought.models.critic import Critic as Critic
    from forethought.models.engine import Engine as Engine
    from forethought.models.engine import Sampling as Sampling
    from forethought.models.load import LoRA as LoRA
    from forethought.models.load import load_model as load_model
    from forethought.models.load import save_pretrained as save_pretrained
    from forethought.models.openai_engine import OpenAIEngine as OpenAIEngine
    from forethought.models.policy import Policy as Policy
    from forethought.models.scripted_engine import ScriptedEngine as ScriptedEngine
    from forethought.models.tiny import byte_tokenizer as byte_tokenizer
    from forethought.models.tiny import char_tokenizer as char_tokenizer
    from forethought.models.tiny import tiny_model as tiny_model
    from forethought.models.tiny import word_tokenizer as word_tokenizer
    from forethought.models.torch_engine import TorchEngine as TorchEngine
    from forethought.progress import Progress as Progress
    from forethought.report.html import write_report as write_report
    from forethought.rewards.adapters import RewardRunner as RewardRunner
    from forethought.rewards.adapters import combine as combine
    from forethought.rewards.adapters import from_trl as from_trl
    from forethought.rewards.adapters import from_verl as from_verl
    from forethought.rewards.adapters import load_reward as load_reward
    from forethought.rewards.judge import ChatJudge as ChatJudge
    from forethought.rewards.judge import Grader as Grader
    from forethought.rewards.math_rewards import FormatReward as FormatReward
    from forethought.rewards.math_rewards import OutcomeReward as OutcomeReward
    from forethought.rewards.oracles import BothOrders as BothOrders
    from forethought.rewards.oracles import BradleyTerry as BradleyTerry
    from forethought.rewards.oracles import FunctionOracle as FunctionOracle
    from forethought.rewards.oracles import JudgeOracle as JudgeOracle
    from forethought.rewards.oracles import check_oracle as check_oracle
    from forethought.rewards.pairs import oracle_pairs as oracle_pairs
    from forethought.rewards.pairs import verified_pairs as verified_pairs
    from forethought.rewards.reward import Reward as Reward
    from forethought.rewards.verify import Verdict as Verdict
    from forethought.rewards.verify import Verifier as Verifier
    from forethought.rewards.verify import check as check
    from forethought.rundir import RunDir as RunDir
    from forethought.search.mcts import Budget as SearchBudget
    from forethought.search.mcts import SearchConfig as SearchConfig
    from forethought.search.policies import LegalActions as LegalActions
    from forethought.search.policies import SampledActions as SampledActions
    from forethought.search.result import SearchTree as SearchTree
    from forethought.search.rules import PUCT as PUCT
    from forethought.search.rules import UCT as UCT
    from forethought.search.search import SearchResult as SearchResult
    from forethought.search.search import load as load_search
    from forethought.search.search import search as tree_search
    from forethought.tree import credit as credit
    from forethought.tree.pack import pack as pack
    from forethought.tree.pack import write_back as write_back
    from forethought.tree.store import TreeStore as TreeStore
    from forethought.tree.tree import Kind as Kind
    from forethought.tree.tree import Stop as Stop
    from forethought.tree.tree import TokenTree as TokenTree

_NAMES: dict[str, str] = {
    # experience
    "tree.tree": "TokenTree Kind Stop",
    "tree.pack": "pack write_back",
    "tree.credit": "credit",
    "tree.store": "TreeStore",
    # models
    "models.policy": "Policy",
    "models.critic": "Critic",
    "models.engine": "Engine Sampling",
    "models.torch_engine": "TorchEngine",
    "models.openai_engine": "OpenAIEngine",
    "models.scripted_engine": "ScriptedEngine",
    "models.chat": "ChatRenderer sft_tree sft_trees preference_tree",
    "models.load": "load_model save_pretrained LoRA",
    "models.tiny": "tiny_model char_tokenizer word_tokenizer byte_tokenizer",
    # worlds and rewards
    "envs.env": "Env Step",
    "envs.problem": "ProblemEnv",
    "envs.check": "check_env",
    "envs.world_model": "WorldModel WorldModelEnv",
    "envs.registry": "find_env",
    "envs.sokoban": "SokobanEnv",
    "envs.household": "HouseholdEnv",
    "rewards.reward": "Reward",
    "rewards.adapters": "RewardRunner from_trl from_verl combine load_reward",
    "rewards.math_rewards": "OutcomeReward FormatReward",
    "rewards.verify": "Verifier Verdict check",
    "rewards.judge": "ChatJudge Grader",
    "rewards.oracles": "FunctionOracle BradleyTerry JudgeOracle BothOrders check_oracle",
    "rewards.pairs": "oracle_pairs verified_pairs",
    # learning
    "learn.losses": "losses",
    "learn.pair_losses": "pair_losses",
    "learn.learner": "Learner Targets",
    "learn.optim": "OptimConfig",
    "learn.online": "OnlineConfig OnlineTrainer",
    "learn.episodes": "Episode EpisodeRules Players",
    "learn.episode_trainer": "EpisodeConfig EpisodeTrainer",
    "learn.offline": "SFTConfig SFTTrainer",
    "learn.pairs": "PairConfig PairTrainer PreferencePair annotate_pairs=annotate usable_pairs",
    "learn.ppo": "PPOConfig PPOTrainer PartConfig",
    "learn.preference_game": "GameConfig GameTrainer",
    "learn.session": "fit",
    # search
    "search.search": "SearchResult load_search=load tree_search=search",
    "search.mcts": "SearchBudget=Budget SearchConfig",
    "search.rules": "PUCT UCT",
    "search.policies": "LegalActions SampledActions",
    "search.result": "SearchTree",
    # evaluation and runs
    "evaluate.suites": "EvalResult evaluate_tasks=evaluate",
    "evaluate.stats": "wilson bootstrap_ci paired_bootstrap pass_at_k",
    "report.html": "write_report",
    "data": "load_tasks read_jsonl write_jsonl BatchSampler",
    "rundir": "RunDir",
    "progress": "Progress",
    "errors": "ForethoughtError ConfigError DataError ModelError RewardError EnvError RunError EngineError "
    "MissingExtraError",
}
_MODULES = ("credit", "losses", "pair_losses")  # names that are modules
_WHERE = {
    name.partition("=")[0]: (f"forethought.{module}", name.partition("=")[2] or name)
    for module, names in _NAMES.items()
    for name in names.split()
}

__all__ = [
    "BatchSampler",
    "BothOrders",
    "BradleyTerry",
    "ChatJudge",
    "ChatRenderer",
    "ConfigError",
    "Critic",
    "DataError",
    "Engine",
    "EngineError",
    "Env",
    "EnvError",
    "Episode",
    "EpisodeConfig",
    "EpisodeRules",
    "EpisodeTrainer",
    "EvalResult",
    "ForethoughtError",
    "FormatReward",
    "FunctionOracle",
    "GameConfig",
    "GameTrainer",
    "Grader",
    "HouseholdEnv",
    "JudgeOracle",
    "Kind",
    "Learner",
    "LegalActions",
    "LoRA",
    "MissingExtraError",
    "ModelError",
    "OnlineConfig",
    "OnlineTrainer",
    "OpenAIEngine",
    "OptimConfig",
    "OutcomeReward",
    "PPOConfig",
    "PPOTrainer",
    "PUCT",
    "PairConfig",
    "PairTrainer",
    "PartConfig",
    "Players",
    "Policy",
    "PreferencePair",
    "ProblemEnv",
    "Progress",
    "Reward",
    "RewardError",
    "RewardRunner",
    "RunDir",
    "RunError",
    "SFTConfig",
    "SFTTrainer",
    "SampledActions",
    "Sampling",
    "ScriptedEngine",
    "SearchBudget",
    "SearchConfig",
    "SearchResult",
    "SearchTree",
    "SokobanEnv",
    "Step",
    "Stop",
    "Targets",
    "TokenTree",
    "TorchEngine",
    "TreeStore",
    "UCT",
    "Verdict",
    "Verifier",
    "WorldModel",
    "WorldModelEnv",
    "annotate_pairs",
    "bootstrap_ci",
    "byte_tokenizer",
    "char_tokenizer",
    "check",
    "check_env",
    "check_oracle",
    "combine",
    "credit",
    "evaluate_tasks",
    "find_env",
    "fit",
    "from_trl",
    "from_verl",
    "load_model",
    "load_reward",
    "load_search",
    "load_tasks",
    "losses",
    "oracle_pairs",
    "pack",
    "pair_losses",
    "paired_bootstrap",
    "pass_at_k",
    "preference_tree",
    "read_jsonl",
    "save_pretrained",
    "sft_tree",
    "sft_trees",
    "tiny_model",
    "tree_search",
    "usable_pairs",
    "verified_pairs",
    "wilson",
    "word_tokenizer",
    "write_back",
    "write_jsonl",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _WHERE[name]
    found = importlib.import_module(module)
    value = found if name in _MODULES else getattr(found, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
