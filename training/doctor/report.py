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
    rows: list[tuple[str, Finding]] = []
    for name, findings in supervise([name for name in names if not (args.no_speed and name in TIMED)]):
        rows += [(name, finding) for finding in findings]
        for number, finding in enumerate(() if args.json else findings):
            print(render(name if number == 0 else "", finding), flush=True)
    faults = [finding for _, finding in rows if finding.status == "fault"]
    if args.json:
        found = [{"check": name, **asdict(finding)} for name, finding in rows]
        print(json.dumps({"exit_code": int(bool(faults)), "findings": found}, indent=2))
    else:
        commands = dict.fromkeys(finding.cure for finding in faults if finding.cure)
        print(f"{len(faults)} broken; to fix:" if faults else "healthy: nothing is broken")
        for number, command in enumerate(commands, 1):
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


def supervise(left: list[str]) -> Iterator[tuple[str, list[Finding]]]:
    """Yield checks with their findings, also checks that crash or hang their process."""
    context = get_context("spawn")
    while left:
        receiver, sender = context.Pipe(duplex=False)
        checks = {name: CHECKS[name] for name in left}
        process = context.Process(target=_work, args=(checks, sender), daemon=True)
        process.start()
        sender.close()
        raised = False
        while left and not raised:  # a CUDA error spoils every later call in its process
            name, left = left[0], left[1:]
            if not receiver.poll(SECONDS):
                findings, raised = [Finding("fault", f"this check hangs: no answer in {SECONDS} s")], True
            else:
                try:
                    findings, raised = receiver.recv()
                except EOFError:
                    process.join()
                    text = f"this check ended its process with exit code {process.exitcode}"
                    findings, raised = [Finding("fault", text)], True
            yield name, findings
        process.kill()
        process.join()


def _work(checks: dict[str, str], sender: Connection) -> None:
    if os.environ.get("NVTE_DEBUG") != "1":  # messages of libraries would hide the report
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    for name, check in checks.items():
        applies = name not in ON_GPU or import_module("torch").cuda.is_available()
        sender.send(examine(check) if applies else ([], False))


def examine(check: str) -> tuple[list[Finding], bool]:
    """Run a check in this process; return its findings, and True if it raised."""
    module, function = check.split(":")
    findings: list[Finding] = []
    try:
        for finding in getattr(import_module(module), function)():
            findings.append(finding)  # one by one, to keep those before an exception
    except Exception as error:
        text = f"this check failed: {type(error).__name__}: {first_line(error)}"
        return [*findings, Finding("fault", text)], True
    return findings, False
