"""Sokoban: rooms of measured difficulty (`generate`), the game (`level`), exact solvers (`solver`), an oracle for world
models (`oracle`) and the text environment (`env`)."""

from forethought.envs.sokoban.env import SokobanEnv as SokobanEnv
from forethought.envs.sokoban.generate import Difficulty as Difficulty
from forethought.envs.sokoban.generate import generate as generate
from forethought.envs.sokoban.generate import sokoban_tasks as sokoban_tasks
from forethought.envs.sokoban.level import ACTIONS as ACTIONS
from forethought.envs.sokoban.level import Level as Level
from forethought.envs.sokoban.level import State as State
from forethought.envs.sokoban.level import parse_level as parse_level
from forethought.envs.sokoban.solver import solve as solve
