"""Print on one screen what this machine can train, what is broken, and the commands that fix it.

python -m training.doctor [--no_speed] [--json]

Exit code 0: healthy, also without a GPU (TE layers and FP8 are emulated there); 1: something is broken; 2: an
unknown flag. Checks run in a child process: one that crashes or hangs is a fault, and the rest still runs.
"""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection

from core.errors import first_line
from training.doctor.machine import Finding

WIDTH = 110
SECONDS = 300  # a check that takes longer hangs; the first TE layers on a GPU take some ten
CHECKS = {  # functions that yield findings
    "machine": "training.doctor.machine:check_machine",
    "packages": "training.doctor.machine:check_packages",
    "gpu": "training.doctor.machine:check_gpus",
    "cudnn": "training.doctor.layers:check_cudnn",
    "te": "training.doctor.layers:check_te",
    "flash": "training.doctor.layers:check_flash_attention",
    "recipes": "training.doctor.layers:check_recipes",
    "attention": "training.doctor.layers:check_attention",
    "gemm": "training.doctor.layers:time_gemms",
    "layer": "training.doctor.layers:time_layer",
}
WITHOUT_TORCH = ("machine", "packages")
ON_GPU, TIMED = ("cudnn", "flash", "attention", "gemm", "layer"), ("gemm", "layer")


def main(argv: list[str] | None = None) -> int:
    """Run the checks, print their findings as they come, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m training.doctor", description=__doc__.split("\n")[0])
    parser.add_argument("--no_speed", action="store_true", help="skip what is timed, about ten seconds")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    args = parser.parse_args(argv)
    names = CHECKS if find_spec("torch") else WITHOUT_TORCH
    rows: list[dict] = []
    for name, findings in supervise([name for name in names if not (args.no_speed and name in TIMED)]):
        rows += [{"check": name, **asdict(finding)} for finding in findings]
        for number, finding in enumerate(() if args.json else findings):
            print(render("" if number else name, finding), flush=True)
    faults = [row for row in rows if row["status"] == "fault"]
    if args.json:
        print(json.dumps({"exit_code": int(bool(faults)), "findings": rows}, indent=2))
        return int(bool(faults))
    print(f"{len(faults)} broken; to fix:" if faults else "healthy: nothing is broken")
    for number, command in enumerate(dict.fromkeys(row["cure"] for row in faults if row["cure"]), 1):
        print(f"{number}. {command}")
    return int(bool(faults))


def render(name: str, finding: Finding) -> str:
    """Format a finding as a line of the report, wrapped under its label."""
    label = finding.status.upper() if finding.status in ("warn", "fault") else finding.status
    cure = f" (see: {finding.cure})" if finding.status == "warn" and finding.cure else ""
    head, text = f"{label:<6}{name:<11}", finding.text + cure
    if len(head + text) <= WIDTH:  # keeps the columns of recipes
        return head + text
    lines = textwrap.wrap(text, WIDTH - len(head), break_long_words=False, break_on_hyphens=False)
    return head + f"\n{' ' * len(head)}".join(lines)


def supervise(names: list[str]) -> Iterator[tuple[str, list[Finding]]]:
    """Yield checks with their findings, also checks that crash or hang their process."""
    context = get_context("spawn")
    while names:
        receiver, sender = context.Pipe(duplex=False)
        checks = {name: CHECKS[name] for name in names}
        process = context.Process(target=_work, args=(checks, sender), daemon=True)
        process.start()
        sender.close()
        usable = True
        while names and usable:  # a CUDA error spoils every later call in its process
            name, *names = names
            problem = f"hangs: no answer in {SECONDS} s"
            findings, usable = [], False
            if receiver.poll(SECONDS):
                try:
                    findings, problem = receiver.recv()
                    usable = not problem
                except EOFError:
                    process.join()
                    problem = f"ended its process with exit code {process.exitcode}"
            yield name, findings + ([] if usable else [Finding("fault", f"this check {problem}")])
        process.kill()
        process.join()


def _work(checks: dict[str, str], sender: Connection) -> None:
    """Run the checks in this process; send the findings of each, and the error that ended it, or None."""
    if os.environ.get("NVTE_DEBUG") != "1":  # messages of libraries would hide the report
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    for name, check in checks.items():
        module, function = check.split(":")
        findings, problem = [], None
        try:
            if name not in ON_GPU or import_module("torch").cuda.is_available():
                for finding in getattr(import_module(module), function)():
                    findings.append(finding)  # one by one, to keep those before an exception
        except Exception as error:
            problem = f"failed: {type(error).__name__}: {first_line(error)}"
        sender.send((findings, problem))
