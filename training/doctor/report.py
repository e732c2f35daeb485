"""Print on one screen what this machine can train, what is broken, and the commands that fix it.

python -m training.doctor [--json]

Exit code 0: healthy, also without a GPU (TE layers and FP8 are emulated there); 1: something is broken.
Checks that import torch run in processes of their own: if one crashes or hangs, the rest still runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import textwrap
from dataclasses import asdict
from importlib.util import find_spec

from fp8_suite.core.packages import hide_interrupts
from fp8_suite.training.doctor import checks
from fp8_suite.training.doctor.checks import Finding

WIDTH = 110
SECONDS = 300  # a check that takes longer hangs; the first TE layers on a GPU take some ten
CHECKS = ("machine", "packages", "gpus", "te", "recipes")
WITH_TORCH = ("gpus", "te", "recipes")


def main(argv: list[str] | None = None) -> int:
    """Run the checks, print their findings as they come, and return the exit code."""
    hide_interrupts()
    parser = argparse.ArgumentParser(prog="python -m training.doctor", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--check", choices=CHECKS, help=argparse.SUPPRESS)  # for a child process
    args = parser.parse_args(argv)
    if args.check:
        print(json.dumps([asdict(finding) for finding in examine(args.check)]))
        return 0
    rows: list[dict] = []
    for name in CHECKS if find_spec("torch") else CHECKS[:2]:
        findings = examine_in_child(name) if name in WITH_TORCH else examine(name)
        rows += [{"check": name, **asdict(finding)} for finding in findings]
        for number, finding in enumerate(() if args.json else findings):
            print(render("" if number else name, finding), flush=True)
    faults = [row for row in rows if row["status"] == "fault"]
    if args.json:
        print(json.dumps({"exit_code": int(bool(faults)), "findings": rows}, indent=2))
        return int(bool(faults))
    print(f"{len(faults)} broken" if faults else "healthy: nothing is broken")
    for word, status in (("to fix", "fault"), ("to install what is missing", "note")):
        for command in dict.fromkeys(row["cure"] for row in rows if row["cure"] and row["status"] == status):
            print(f"{word}: {command}")
    return int(bool(faults))


def examine(name: str) -> list[Finding]:
    return list(getattr(checks, f"check_{name}")())


def examine_in_child(name: str) -> list[Finding]:
    """Return the findings of a check, or the fault that ended its process."""
    command = [sys.executable, "-m", "fp8_suite.training.doctor", "--check", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return [Finding("fault", f"this check hangs: no answer in {SECONDS} s")]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return [Finding("fault", f"this check ends with exit code {done.returncode}: {last}")]
    return [Finding(**finding) for finding in json.loads(done.stdout.splitlines()[-1])]


def render(name: str, finding: Finding) -> str:
    """Format a finding as a line of the report, wrapped under its label."""
    label = finding.status.upper() if finding.status == "fault" else finding.status
    head = f"{label:<6}{name:<9}"
    if len(head + finding.text) <= WIDTH:  # keeps the columns of recipes
        return head + finding.text
    lines = textwrap.wrap(finding.text, WIDTH - len(head), break_long_words=False, break_on_hyphens=False)
    return head + f"\n{' ' * len(head)}".join(lines)
