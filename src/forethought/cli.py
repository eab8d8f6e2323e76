"""The command `forethought`. Heavy imports happen inside the commands, so `--help` answers at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from forethought import __version__
from forethought.errors import ConfigError, ForethoughtError
from forethought.recipes.train import METHODS

_PROMPTS = (
    "A prompt that is text is given to the model as it stands, as in TRL; a list of messages is a conversation and is "
    "rendered by the model's chat template. --chat makes a user turn of every text."
)
_SETTINGS = "settings as key=value, dotted for groups (optim.lr=3e-5); unknown keys are errors"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forethought",
        description="Language-model agents that get better by imagining, searching and learning.",
        epilog="Start with `forethought demo`: it trains a real small model on your CPU and shows what it gained.",
    )
    parser.add_argument("--version", action="version", version=f"forethought {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the whole traceback of an error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def command(name: str, help: str, **kwargs) -> argparse.ArgumentParser:
        description = help[0].upper() + help[1:] + "."
        sub = commands.add_parser(name, help=help, description=description, allow_abbrev=False, **kwargs)
        sub.set_defaults(function=globals()[f"_{name.replace('-', '_')}"])
        return sub

    def writes(sub: argparse.ArgumentParser, out: str) -> None:
        sub.add_argument("--out", default=out, metavar="DIR", help=f"run folder (default: {out})")
        how = sub.add_mutually_exclusive_group()
        how.add_argument("--resume", action="store_true", help="go on with the run in DIR from its newest checkpoint")
        how.add_argument("--overwrite", action="store_true", help="replace the run in DIR")

    def prompts(sub: argparse.ArgumentParser, answer: str) -> None:
        sub.add_argument(
            "--prompt-column",
            metavar="NAME",
            help="column of the prompt (default: prompt); a.b reaches into columns, '{Body} {Question}' joins several",
        )
        sub.add_argument("--answer-column", metavar="NAME", help=answer)
        sub.add_argument("--suffix", metavar="TEXT", help="text added behind every prompt")
        sub.add_argument(
            "--chat", action="store_true", default=None, help="make a user turn of every prompt that is text"
        )
        sub.add_argument("--limit", type=int, metavar="N", help="use the first N records")
        sub.add_argument("--device", help="cpu, cuda, mps (default: the best that is there)")
        sub.add_argument(
            "--dtype", choices=("fp32", "bf16"), help="compute precision (default: by device; the reason is printed)"
        )

    command("list", "list the systems with their papers and what their mini profile costs")

    sub = command("run", "run a system: its method, the paper's baselines and the controls, at counted budget")
    sub.add_argument("recipe", help="a name from `forethought list`")
    sub.add_argument(
        "--profile", default="smoke", choices=("smoke", "mini", "paper"), help="how large (default: smoke, seconds)"
    )
    sub.add_argument("--seeds", type=int, metavar="N", help="seeds 0 to N-1 (default: the profile's)")
    sub.add_argument("--dry-run", action="store_true", help="print the resolved settings and stop")
    writes(sub, "runs/RECIPE-PROFILE")
    sub.add_argument("settings", nargs="*", metavar="key=value", help=_SETTINGS)

    sub = command(
        "train",
        f"train your model on your data: {', '.join(METHODS)}",
        epilog=f"{_PROMPTS} `forethought train METHOD --dry-run` prints all settings with their defaults.",
    )
    methods = "; ".join(f"{name}: {method.line}" for name, method in METHODS.items())
    sub.add_argument("method", choices=tuple(METHODS), metavar="METHOD", help=methods)
    sub.add_argument("--model", help="registry name, Hugging Face id or local folder")
    sub.add_argument(
        "--env",
        metavar="NAME[:SETTINGS]",
        help="grpo: act in a text environment in place of answering prompts: sokoban, household, ... or my_env.py:Env "
        "(docs/agents.md)",
    )
    sub.add_argument(
        "--data",
        metavar="FILE",
        help="JSONL (or parquet): messages | prompt + completion | prompt + chosen + rejected | prompt + columns",
    )
    sub.add_argument(
        "--reward",
        action="append",
        metavar="FILE.py:NAME",
        help="grpo, ppo: a TRL-style, verl-style or native reward function, or `math` (`math:last_number` ...) for the math "
        "verifier on the column `answer`; may be repeated (the sum counts, see reward_weights); inpo, sppo, online-dpo: "
        "compare answers by it (Bradley-Terry)",
    )
    sub.add_argument(
        "--oracle",
        metavar="FILE.py:NAME",
        help="inpo, sppo, online-dpo: compare answers by a function f(task, a, b) -> P(a wins), by `reward`, or by `judge` "
        "(a chat model: --judge-url, --judge-model)",
    )
    sub.add_argument("--judge-url", metavar="URL", help="OpenAI-compatible server of the judge")
    sub.add_argument("--judge-model", metavar="NAME", help="the name that this server knows")
    sub.add_argument("--lora", action="store_true", help="train a LoRA adapter (extra: peft) instead of all weights")
    sub.add_argument(
        "--config",
        metavar="FILE.yaml",
        help="settings from a YAML file (a run's config.yaml, too); flags come after it",
    )
    prompts(sub, "column that a reward reads as `answer` (default: answer); sft: column of the completion")
    sub.add_argument(
        "--eval-data", metavar="FILE", help="held-out records in the same columns, evaluated before and after"
    )
    sub.add_argument("--dry-run", action="store_true", help="print the resolved settings and stop")
    writes(sub, "runs/train")
    sub.add_argument("settings", nargs="*", metavar="key=value", help=_SETTINGS)

    sub = command(
        "pairs",
        "make preference pairs: sample answers, judge them by a reward or an oracle, write TRL-format records",
        epilog=f"{_PROMPTS} Further settings are listed under 'Preference data and oracles' in docs/data-and-rewards.md.",
    )
    sub.add_argument(
        "--model", help="registry name, Hugging Face id or local folder (with --endpoint: the server's name)"
    )
    sub.add_argument("--data", metavar="FILE", help="JSONL (or parquet) of prompts")
    sub.add_argument("--endpoint", metavar="URL", help="sample from this OpenAI-compatible server, such as a teacher's")
    sub.add_argument(
        "--rollouts", metavar="FILE", help="records with `samples` that are there already, in place of both"
    )
    sub.add_argument("--samples", type=int, metavar="K", help="samples a prompt (default: 8)")
    sub.add_argument(
        "--reward",
        action="append",
        metavar="FILE.py:NAME",
        help="pairs of a right and a wrong sample by this reward, or `math` for the math verifier on the column `answer`",
    )
    sub.add_argument(
        "--oracle",
        metavar="FILE.py:NAME",
        help="compare samples by a function f(task, a, b) -> P(a wins), by `reward` (Bradley-Terry on --reward), or by "
        "`judge` (a chat model: --judge-url, --judge-model)",
    )
    sub.add_argument(
        "--mode",
        choices=("verified", "iid", "soft", "tournament", "max_min"),
        help="how pairs are made (default: verified with --reward, tournament with --oracle)",
    )
    sub.add_argument("--judge-url", metavar="URL", help="OpenAI-compatible server of the judge")
    sub.add_argument("--judge-model", metavar="NAME", help="the name that this server knows")
    prompts(sub, "column that a reward reads as `answer` (default: answer)")
    writes(sub, "runs/pairs")
    sub.add_argument("settings", nargs="*", metavar="key=value", help=_SETTINGS)

    sub = command("eval", "evaluate a model on problems with known answers, with intervals", epilog=_PROMPTS)
    sub.add_argument("--model", required=True, help="registry name, Hugging Face id or local folder")
    sub.add_argument("--data", metavar="FILE", help="JSONL (or parquet) of problems")
    prompts(sub, "column of the gold answer (default: answer); of a whole solution what follows #### or its box counts")
    sub.add_argument(
        "--reward",
        action="append",
        metavar="FILE.py:NAME",
        help="judge with this reward (1 is right) instead of the math verifier",
    )
    sub.add_argument(
        "--mode",
        choices=("math-verify", "train-strict", "eval-qwen"),
        help="mode of the math verifier (default: math-verify); accuracies of different modes are not on one scale",
    )
    sub.add_argument(
        "--extract",
        choices=("box", "last_number", "bare", "any"),
        help="what of a response counts as its answer (default: box, the last \\boxed{})",
    )
    sub.add_argument("--samples", type=int, metavar="N", help="samples a problem (default: 1; more need a temperature)")
    sub.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: 0)")
    sub.add_argument("--top-p", type=float, metavar="P", help="nucleus sampling (default: 1, off)")
    sub.add_argument("--max-new-tokens", type=int, metavar="N", help="longest response (default: 256; a turn: 64)")
    sub.add_argument("--stop", action="append", metavar="TEXT", help="end a response at this text; may be repeated")
    sub.add_argument("--seed", type=int, metavar="N", help="seed of the samples (default: 0)")
    sub.add_argument(
        "--against", metavar="RUN", help="folder of another evaluation of the same data, for a paired comparison"
    )
    search = sub.add_argument_group("ways to answer, at one number of generated tokens a problem (docs/search.md)")
    search.add_argument(
        "--search",
        metavar="METHODS",
        help="compare these, with commas: greedy, best-of-n, majority, weighted, beam, mcts; or `all` (the first one is "
        "compared with each other)",
    )
    search.add_argument("--budget", type=int, metavar="TOKENS", help="what each method may generate for a problem")
    search.add_argument(
        "--critic",
        metavar="FILE.py:NAME",
        help="chooses among answers and steps: leaves -> numbers; without it, the mean token probability does",
    )
    search.add_argument("--option-tokens", type=int, metavar="N", help="longest step of beam and mcts (default: 32)")
    search.add_argument("--width", type=int, metavar="N", help="options of a step (default: 4)")
    search.add_argument("--depth", type=int, metavar="N", help="steps of the longest path of mcts (default: 16)")
    search.add_argument("--c", type=float, metavar="C", help="exploration of mcts, the constant of UCT (default: 1)")
    worlds = sub.add_argument_group("episodes in a text environment (docs/agents.md)")
    worlds.add_argument(
        "--env", metavar="NAME[:SETTINGS]", help="act in this environment: sokoban, household, ... or my_env.py:Env"
    )
    worlds.add_argument("--split", metavar="NAME", help="split of its tasks (default: heldout)")
    worlds.add_argument("--tasks", type=int, metavar="N", help="tasks to play (default: 64)")
    worlds.add_argument(
        "settings", nargs="*", metavar="key=value", help="how episodes are played, such as max_turns=20 history=2"
    )
    writes(sub, "runs/eval")

    sub = command("show", "show runs, or a data file, in the terminal")
    sub.add_argument("paths", nargs="+", help="run folders (several are compared) or a JSONL file")
    sub.add_argument("--trees", type=int, default=2, help="sampled rollouts, or records, to print (default: 2)")

    sub = command("report", "write report.html of a run anew and print its path")
    sub.add_argument("run", help="run folder")

    sub = command("check-env", "walk through your environment and say which rules of the protocol it breaks")
    sub.add_argument("env", metavar="FILE.py:NAME", help="a class or factory that makes the environment")
    sub.add_argument("--seeds", type=int, default=3, help="episodes to walk (default: 3)")

    command("doctor", "print what a bug report needs: versions, processor, precision, extras")

    sub = command("demo", "train SmolLM2-135M-Instruct by GRPO on arithmetic, against controls, in minutes on a CPU")
    sub.add_argument("--model", help="another model (default: smollm2-135m-instruct)")
    writes(sub, "runs/demo")
    sub.add_argument("settings", nargs="*", metavar="key=value", help=_SETTINGS)
    return parser


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _finish(run_path: Path) -> None:
    """What every writing command ends with: the table in the terminal and the page."""
    from forethought.report.html import write_report
    from forethought.report.terminal import show

    write_report(run_path)
    show(run_path, trees=0)


def _list(args) -> None:
    from forethought.recipes import CATALOGUE

    for entry in CATALOGUE:
        print(f"{entry.slug}\n    {entry.line}\n    paper: {entry.paper}; mini profile: {entry.mini}")
        print(f"    forethought run {entry.slug}\n")
    print(
        f"your own job: forethought train {'|'.join(METHODS)} --model MODEL --data FILE.jsonl [--reward FILE.py:NAME]"
    )
    print("your own preference data: forethought pairs --model MODEL --data FILE.jsonl --reward|--oracle FILE.py:NAME")


def _run(args) -> None:
    from forethought import recipes
    from forethought.config import apply_overrides, dump_yaml
    from forethought.rundir import RunDir

    entry = recipes.find(args.recipe)
    module = recipes.load(args.recipe)
    overrides = list(args.settings)
    if args.seeds is not None:
        if args.seeds < 1:
            raise ConfigError(f"--seeds {args.seeds}: give at least 1")
        overrides.append(f"seeds={list(range(args.seeds))}")
    config = apply_overrides(module.PROFILES[args.profile], overrides)
    if args.dry_run:
        print(dump_yaml(config), end="")
        return
    out = Path(f"runs/{entry.slug}-{args.profile}" if args.out == "runs/RECIPE-PROFILE" else args.out)
    with RunDir.create(out, config, resume=args.resume, overwrite=args.overwrite) as run:
        run.write_json("results.json", module.run(config, run, profile=args.profile))
        _finish(run.path)


def _train(args) -> None:
    from forethought.recipes.train import train

    path = train(args, say=_say)
    if path is not None:
        _finish(path)


def _pairs(args) -> None:
    from forethought.recipes.preference_data import make_pairs
    from forethought.report.terminal import show

    path = make_pairs(args, say=_say)
    _finish(path)
    show(path / "pairs.jsonl", trees=1)


def _eval(args) -> None:
    if args.env is not None:
        from forethought.recipes.env_eval import evaluate_in_env

        _finish(evaluate_in_env(args, say=_say))
        return
    if args.split is not None or args.tasks is not None or args.settings:
        raise ConfigError("--split, --tasks and key=value settings belong to episodes; add --env NAME")
    if args.data is None:
        raise ConfigError("eval: give --data FILE (problems with answers), or --env NAME (episodes)")
    if args.search is not None:
        from forethought.recipes.search_eval import compare_methods

        _finish(compare_methods(args, say=_say))
        return
    given = [n for n in ("budget", "critic", "option_tokens", "width", "depth", "c") if getattr(args, n) is not None]
    if given:
        raise ConfigError(f"--{given[0].replace('_', '-')} is a setting of --search; add --search METHODS")
    from forethought.recipes.evaluation import evaluate_model

    _finish(evaluate_model(args, say=_say))


def _show(args) -> None:
    from forethought.report.terminal import compare, show

    paths = [Path(p) for p in args.paths]
    if len(paths) == 1 or all(p.is_file() for p in paths):
        for path in paths:
            show(path, trees=args.trees)
    else:
        compare(paths)


def _report(args) -> None:
    from forethought.report.html import write_report

    print(write_report(Path(args.run)))


def _check_env(args) -> int:
    from forethought.envs.check import check_env

    report = check_env(args.env, seeds=args.seeds)
    print(report.render())
    return 0 if report.ok else 1


def _doctor(args) -> None:
    from forethought.doctor import collect, render

    print(render(collect()))


def _demo(args) -> None:
    from forethought.config import apply_overrides
    from forethought.models.registry import resolve
    from forethought.recipes import demo
    from forethought.rundir import RunDir

    settings = list(args.settings) + ([f"model={args.model}"] if args.model else [])
    config = apply_overrides(demo.DemoConfig(), settings)
    resolve(config.model, say=_say)  # a model that is not there is named before an old run is replaced
    with RunDir.create(args.out, config, resume=args.resume, overwrite=args.overwrite) as run:
        run.write_json("results.json", demo.run(config, run, say=_say))
        _finish(run.path)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with key=value settings anywhere: argparse takes positional ones in one place only."""
    args, rest = parser.parse_known_args(argv)
    wrong = [r for r in rest if "=" not in r or not hasattr(args, "settings")]
    if wrong:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    if rest:
        args.settings = [*args.settings, *rest]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Exit status: 0 done, 1 a check found problems, 2 bad input, 130 interrupted (and saved)."""
    parser = _parser()
    args = parse(parser, argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        return args.function(args) or 0
    except ForethoughtError as error:
        if args.debug:
            raise
        _say(f"forethought: {error}")
        return 2
    except FloatingPointError as error:
        if args.debug:
            raise
        _say(f"forethought: {error}; try a lower learning rate (optim.lr), or fp32")
        return 2
    except KeyboardInterrupt as error:
        _say(f"\nforethought: {str(error) or 'interrupted'}")
        return 130
    except BrokenPipeError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
