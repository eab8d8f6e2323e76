"""The household: kinds and placement statistics (`kinds`), rules and texts of a room (`world`), rooms, goals and splits
(`generate`), the text environment (`env`) and a planner for demonstrations (`expert`)."""

from forethought.envs.household.env import HouseholdEnv as HouseholdEnv
from forethought.envs.household.env import room_of as room_of
from forethought.envs.household.expert import Expert as Expert
from forethought.envs.household.generate import Rooms as Rooms
from forethought.envs.household.generate import generate as generate
from forethought.envs.household.generate import household_tasks as household_tasks
from forethought.envs.household.world import FAMILIES as FAMILIES
from forethought.envs.household.world import GOALS as GOALS
from forethought.envs.household.world import Goal as Goal
from forethought.envs.household.world import Room as Room
