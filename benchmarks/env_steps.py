"""Environment steps a second on one core, without a model: Sokoban and the household, against gym-sokoban.

    python benchmarks/env_steps.py [--peer none] [--steps 40000]

What is timed: actions as text, observations as text, rewards and infos. "with restore" takes a snapshot, steps, restores
it and steps again, as a search does: two steps for each snapshot and restore. Resets at the ends of episodes are inside.

gym-sokoban 0.0.6 has the same moves, rooms (6x6, one box) and rewards, with numbers as actions and pixels as
observations. Its rows: a step with its cheapest observation, and one with our text made from its arrays in place of
pixels; for restore it has no function, so its arrays and counters are copied. A generated room is compared with a
generated room. The last line is one JSON object; torch is not needed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
import warnings

from forethought.envs.household import HouseholdEnv, Rooms, household_tasks
from forethought.envs.sokoban import Difficulty, SokobanEnv, generate, sokoban_tasks

REPEATS = 5
SYMBOLS = "#_O√XPS"


def rate(function, count: int) -> float:
    """Median of steps a second over the repeats."""
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        function(count)
        seconds.append(time.perf_counter() - began)
    return count / statistics.median(seconds)


def ours(make, tasks) -> dict[str, float]:
    """Plain steps and steps with restore; actions are drawn from the legal ones beforehand, along a recorded walk."""
    env = make()
    walk = []
    for number in range(400):
        step = env.reset(tasks[number % len(tasks)])
        rng = random.Random(number)
        episode = []
        while not step.done:
            episode.append((rng.choice(step.info["actions"]), rng.choice(step.info["actions"])))
            step = env.step(episode[-1][0])
        walk.append((tasks[number % len(tasks)], episode))

    def plain(count: int) -> None:
        done = 0
        while True:
            for task, episode in walk:
                env.reset(task)
                for action, _ in episode:
                    env.step(action)
                done += len(episode)
                if done >= count:
                    return

    def restoring(count: int) -> None:
        done = 0
        while True:
            for task, episode in walk:
                env.reset(task)
                for action, other in episode:
                    held = env.snapshot()
                    env.step(other)
                    env.restore(held)
                    env.step(action)
                done += 2 * len(episode)
                if done >= count:
                    return

    return {"steps_per_s": rate(plain, args.steps), "with_restore_per_s": rate(restoring, args.steps)}


def peer() -> dict[str, float] | None:
    warnings.filterwarnings("ignore")
    try:
        from gym_sokoban.envs import SokobanEnv as Peer
    except Exception as err:  # not installed, or too old for the NumPy that is
        print(f"gym-sokoban is not there ({err}): pip install gym-sokoban")
        return None
    random.seed(0)
    env = Peer(dim_room=(6, 6), num_boxes=1, max_steps=15)
    rng = random.Random(0)
    actions = [rng.randint(1, 4) for _ in range(5000)]

    def text() -> str:
        fixed, state = env.room_fixed, env.room_state
        rows = []
        for r in range(6):
            cells = [SYMBOLS[s] if s != 5 or fixed[r, c] != 2 else "S" for c, s in enumerate(state[r].tolist())]
            rows.append("\t".join(cells))
        return "\n".join(rows)

    def copy() -> tuple:
        return (
            env.room_state.copy(),
            env.player_position.copy(),
            env.boxes_on_target,
            env.num_env_steps,
            env.reward_last,
        )

    def put(held: tuple) -> None:
        env.room_state, env.player_position = held[0].copy(), held[1].copy()
        env.boxes_on_target, env.num_env_steps, env.reward_last = held[2:]

    def as_text(mode: str = "", close: object = None, scale: int = 1) -> str:
        return text()

    env.reset()
    start = copy()

    def again() -> None:  # the same room: its generator is timed on its own
        put(start)

    def pixels(count: int) -> None:
        for i in range(count):
            if env.step(actions[i % 5000], observation_mode="tiny_rgb_array")[2]:
                again()

    def words(count: int) -> None:
        env.render = as_text
        for i in range(count):
            if env.step(actions[i % 5000])[2]:
                again()

    def restoring(count: int) -> None:
        env.render = as_text
        for i in range(count // 2):
            held = copy()
            env.step(actions[-i % 5000])
            put(held)
            if env.step(actions[i % 5000])[2]:
                again()

    def rooms(count: int) -> None:
        for _ in range(count):
            env.reset()

    count = max(1, args.steps // 4)
    result = {"tiny_pixels_per_s": rate(pixels, count), "steps_per_s": rate(words, count)}
    result["with_restore_per_s"] = rate(restoring, count)
    env.render = as_text
    result["rooms_per_s"] = rate(rooms, 100)
    return result


def main() -> None:
    sokoban = sokoban_tasks(200)
    result: dict = {"benchmark": "env_steps", "target_per_s": 20_000}
    result["sokoban grid"] = ours(lambda: SokobanEnv(rules=False), sokoban)
    result["sokoban coordinates"] = ours(lambda: SokobanEnv(rules=False, text="coordinates"), sokoban)
    for name, rooms in (("household mini", ("mini",)), ("household", ("kitchen", "livingroom", "bedroom", "bathroom"))):
        result[name] = ours(lambda: HouseholdEnv(rules=False), household_tasks(200, what=Rooms(rooms)))
    seeds = iter(range(10**9))

    def rooms_of(count: int) -> None:
        for _ in range(count):
            generate(next(seeds), Difficulty(min_moves=1, max_moves=15))

    result["sokoban grid"]["rooms_per_s"] = rate(rooms_of, 200)
    found = peer() if args.peer == "auto" else None
    if found:
        result["gym-sokoban"] = found
        result["ratio"] = {
            k: round(result["sokoban grid"][k] / found[k], 1) for k in found if k in result["sokoban grid"]
        }
    for name, numbers in result.items():
        if isinstance(numbers, dict):
            print(f"{name:22}", ", ".join(f"{k} {v:,.1f}" for k, v in numbers.items()))
    worst = min(v["with_restore_per_s"] for k, v in result.items() if k.startswith(("sokoban", "household")))
    result["met"] = worst >= result["target_per_s"]
    result["machine"] = {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()}
    result["python"] = platform.python_version()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=("auto", "none"), default="auto", help="none: time ours alone")
    parser.add_argument("--steps", type=int, default=40_000, help="steps a repetition")
    args = parser.parse_args()
    main()
