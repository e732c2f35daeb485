"""Print on one screen what this machine can train, what is broken, and the commands that fix it.

python -m training.doctor [--json]

Exit code 0: healthy, also without a GPU (TE layers and FP8 are emulated there); 1: something is broken; 2: an
unknown flag. Checks run in a child process: one that crashes or hangs is a fault, and the rest still runs.
"""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context

from fp8_suite.core.errors import first_line
from fp8_suite.core.start import hide_interrupts
from fp8_suite.training.doctor.machine import Finding

WIDTH = 110
SECONDS = 300  # a check that takes longer hangs; the first TE layers on a GPU take some ten
CHECKS = {  # functions that yield findings
    "machine": "fp8_suite.training.doctor.machine:check_machine",
    "packages": "fp8_suite.training.doctor.machine:check_packages",
    "gpu": "fp8_suite.training.doctor.machine:check_gpus",
    "cudnn": "fp8_suite.training.doctor.layers:check_cudnn",
    "te": "fp8_suite.training.doctor.layers:check_te",
    "recipes": "fp8_suite.training.doctor.layers:check_recipes",
}
WITHOUT_TORCH = ("machine", "packages")


def main(argv: list[str] | None = None) -> int:
    """Run the checks, print their findings as they come, and return the exit code."""
    hide_interrupts()
    parser = argparse.ArgumentParser(prog="python -m training.doctor", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    args = parser.parse_args(argv)
    rows: list[dict] = []
    for name, findings in supervise(list(CHECKS if find_spec("torch") else WITHOUT_TORCH)):
        rows += [{"check": name, **asdict(finding)} for finding in findings]
        for number, finding in enumerate(() if args.json else findings):
            print(render("" if number else name, finding), flush=True)
    faults = [row for row in rows if row["status"] == "fault"]
    install = " && ".join(dict.fromkeys(row["install"] for row in rows if row["install"]))
    if args.json:
        print(json.dumps({"exit_code": int(bool(faults)), "install": install, "findings": rows}, indent=2))
        return int(bool(faults))
    print(f"{len(faults)} broken" if faults else "healthy: nothing is broken")
    for command in dict.fromkeys(row["cure"] for row in faults if row["cure"]):
        print(f"to fix: {command}")
    if install:
        print(f"to install what is missing: {install}")
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
    context, pool = get_context("spawn"), None
    for name in names:
        pool = pool or ProcessPoolExecutor(1, context, initializer=_silence)
        findings: list[Finding] = []
        try:
            findings, problem = pool.submit(run_check, CHECKS[name]).result(SECONDS)
        except TimeoutError:
            problem = f"hangs: no answer in {SECONDS} s"
        except BrokenProcessPool:
            problem = "crashes its process"
        if problem:  # a CUDA error spoils every later call in its process
            findings.append(Finding("fault", f"this check {problem}"))
            pool = _end(pool)
        yield name, findings
    _end(pool)


def run_check(check: str) -> tuple[list[Finding], str]:
    """Return the findings of a check, and the error that ended it, or ""."""
    module, function = check.split(":")
    findings: list[Finding] = []
    try:
        for finding in getattr(import_module(module), function)():
            findings.append(finding)  # one by one, to keep those before an exception
    except Exception as error:
        return findings, f"failed: {type(error).__name__}: {first_line(error)}"
    return findings, ""


def _silence() -> None:
    if os.environ.get("NVTE_DEBUG") != "1":  # messages of libraries would hide the report
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def _end(pool: ProcessPoolExecutor | None) -> None:
    """Kill a pool's process, which may hang."""
    for process in list(((pool and pool._processes) or {}).values()):
        process.kill()
