"""docs/results pages: the table of the last full run with its command, made from results.json.

    python -m forethought.recipes.page runs/one-shot-rlvr docs/results/one-shot-rlvr.md "COMMAND"

What stands below the line `<!-- by hand -->` of an existing page is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forethought.errors import ConfigError
from forethought.files import from_json, write_atomic
from forethought.recipes.results import markdown_table

HAND = "<!-- by hand -->"


def page(found: Mapping[str, Any], command: str) -> str:
    """The generated part of a results page."""
    metrics = list(
        dict.fromkeys(m for arm in found["arms"].values() for m in arm if "/before" not in m and "/after" not in m)
    )
    budget = found["budget"]
    columns = list(dict.fromkeys(c for row in budget.values() for c in row))
    lines = [
        f"# {found['recipe']}, profile {found['profile']}",
        "",
        f"Claim: {found['claim']}.",
        "",
        f"**Verdict: {found['verdict']}.** Rule: {found['verdict_rule']}.",
        "",
        f"Model: {found['model']}; seeds: {', '.join(map(str, found['seeds']))}. Means with 95% intervals. Made by:",
        "",
        "```bash",
        command,
        "```",
        "",
    ]
    for begin in range(0, len(metrics), 5):
        lines += [markdown_table(found["arms"], metrics[begin : begin + 5]), ""]
    if found.get("differences"):
        rows = {name: {"difference": d} for name, d in found["differences"].items()}
        lines += ["Differences of the first metric, paired:", "", markdown_table(rows, ["difference"]), ""]
    for title, rows in (found.get("tables") or {}).items():
        lines += [f"{title}:", "", _plain(rows), ""]
    lines += ["Counted budget:", "", "| arm | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {arm} | " + " | ".join(f"{row.get(c, 0):,}" for c in columns) + " |" for arm, row in budget.items()]
    lines += ["", *(f"- {note}" for note in found.get("notes", []))]
    made = ", ".join(f"{k} {v}" for k, v in found["versions"].items() if v and k != "git")
    return "\n".join([*lines, "", f"Versions: {made}.", ""])


def _plain(rows: Mapping[str, Mapping[str, float]]) -> str:
    """Rows of single numbers as a Markdown table."""
    columns = list(dict.fromkeys(c for row in rows.values() for c in row))
    out = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    out += [
        f"| {name} | " + " | ".join(f"{row[c]:.3g}" if c in row else "-" for c in columns) + " |"
        for name, row in rows.items()
    ]
    return "\n".join(out)


def main(argv: list[str]) -> int:
    if len(argv) != 3:
        raise ConfigError("usage: python -m forethought.recipes.page RUN PAGE COMMAND")
    run, target, command = Path(argv[0]), Path(argv[1]), argv[2]
    text = page(from_json((run / "results.json").read_text()), command)
    old = target.read_text() if target.is_file() else ""
    kept = old[old.index(HAND) :] if HAND in old else f"{HAND}\n"
    write_atomic(target, f"{text}\n{kept}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
