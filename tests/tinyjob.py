"""A tiny saved model with its data and rewards, as a user would have them: for tests of train, eval and the command."""

import json
from pathlib import Path

from forethought.cli import main
from forethought.models.load import save_pretrained
from forethought.models.tiny import char_tokenizer, tiny_model

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 ?=+.\n"
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ROLES = ("<|user|>", "<|assistant|>", "<|system|>")
REWARDS = '''
import os, signal, time
from pathlib import Path

def share(completions, **kw):
    """TRL style: share of a, b, c."""
    return [sum(c in "abc" for c in text) / max(1, len(text)) for text in completions]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl style: the same number."""
    value = sum(c in "abc" for c in solution_str) / max(1, len(solution_str))
    return {"score": value, "length": len(solution_str)}

def native(tree, leaf, task, text):
    return sum(c in "abc" for c in text) / max(1, len(text))

def logs(completions, log_metric=None, log_extra=None, trainer_state=None, **kw):
    log_metric("samples", len(completions))
    log_extra("shown", [text[:2] for text in completions])
    return [float(trainer_state.global_step) for _ in completions]

def short(completions, **kw):
    return [float(len(text) < 3) for text in completions]

def seen_messages(prompts, completions, **kw):
    assert prompts[0][0]["role"] == "user" and completions[0][0]["role"] == "assistant"
    return [float(len(c[0]["content"])) for c in completions]

def interrupts(completions, trainer_state=None, **kw):
    """Ctrl-C in the third step, once."""
    if trainer_state.global_step == 2 and not Path("interrupted").exists() and len(completions) > 2:
        Path("interrupted").touch()
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(0.2)
    return share(completions)

def breaks(completions, trainer_state=None, **kw):
    """Fails in the third step until the file `mended` is there."""
    if trainer_state.global_step == 2 and not Path("mended").exists():
        raise ValueError("the judge is down")
    return share(completions)

def sometimes(tree, leaf, task, text):
    if text[:1] < "n":
        raise KeyError(text[:1])
    return float(len(text))

def raises(completions, **kw):
    raise RuntimeError("no such judge")

def hangs(completions, **kw):
    time.sleep(60)

def nan(completions, **kw):
    return [float("nan")] * len(completions)

def wrong_length(completions, **kw):
    return [1.0]

def words(completions, **kw):
    return ["good"] * len(completions)

def needs_hint(completions, hint, **kw):
    return [1.0] * len(completions)

def odd(x, y):
    return 1.0
'''


def make_model(folder: Path, *, chat: bool = False, context: int = 64, seed: int = 0) -> Path:
    tokenizer = char_tokenizer(
        ALPHABET, specials=ROLES if chat else (), chat_template=TEMPLATE if chat else None, context=context
    )
    model = tiny_model(len(tokenizer), width=32, layers=1, heads=2, context=context, seed=seed)
    save_pretrained(model, tokenizer, folder)
    return folder


def write(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_job(folder: Path) -> None:
    """model/, data.jsonl, held_out.jsonl and rewards.py in a folder."""
    make_model(folder / "model")
    write(folder / "data.jsonl", [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(10)])
    write(folder / "held_out.jsonl", [{"prompt": f"{i}+2=", "answer": str(i + 2)} for i in range(10)])
    (folder / "rewards.py").write_text(REWARDS)


def grpo(*args: str, reward: str = "share", held_out: bool = False) -> int:
    """`forethought train grpo` on the job in the current folder."""
    extra = ["--eval-data", "held_out.jsonl"] if held_out else []
    command = ["train", "grpo", "--model", "model", "--data", "data.jsonl", "--reward", f"rewards.py:{reward}"]
    settings = ["prompts_per_step=4", "group_size=4", "max_new_tokens=5", "optim.lr=0.01", "steps=4"]
    return main([*command, *extra, "--dtype", "fp32", *settings, *args])


def results(folder: str | Path) -> dict:
    return json.loads((Path(folder) / "results.json").read_text())


def metrics(folder: str | Path) -> list[dict]:
    """The lines of metrics.jsonl without their times."""
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]
