"""What this machine can train, what is wrong with it, and the commands that cure that, on one screen.

python -m training.doctor [--no_speed] [--json]

Exit code 0: healthy, a machine without a GPU too (TE layers run emulated there, and FP8 is emulated); 1:
something is broken; 2: an unknown flag. Checks run in a process of their own, so that one that crashes or
hangs becomes a line like any other fault; the rest then goes on in a new process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from core.errors import first_line
from training.doctor.checks import Finding

WIDTH = 110
LABELS = {"ok": "ok", "note": "note", "warn": "WARN", "fault": "FAULT"}
SECONDS = 240  # a check that takes longer hangs; the first TE layer on a GPU takes some ten


class Check(NamedTuple):
    function: str  # module:function of a generator of findings
    needs: tuple[str, ...] = ()
    timed: bool = False


def _torch_is_missing() -> bool:
    return import_module("training.doctor.gpu").load_error() is not None


def _gpu_is_missing() -> bool:
    return not import_module("torch").cuda.is_available()


def _te_is_missing() -> bool:
    return import_module("training.precision.te_runtime").why_not_te() is not None


# True: the check that needs it is left out, since an earlier one has said why. Asked in the order given.
LACKING = {"torch": _torch_is_missing, "gpu": _gpu_is_missing, "te": _te_is_missing}
# In this order: cuDNN is looked at before TE loads, and what is timed comes last.
CHECKS = {
    "machine": Check("training.doctor.checks:machine"),
    "torch": Check("training.doctor.gpu:torch_itself"),
    "gpu": Check("training.doctor.gpu:gpus", ("torch",)),
    "links": Check("training.doctor.gpu:links", ("torch", "gpu")),
    "cudnn": Check("training.doctor.te:cudnns", ("torch", "gpu")),
    "te": Check("training.doctor.te:te_itself", ("torch",)),
    "flash": Check("training.doctor.te:flash_attention", ("torch", "gpu")),
    "packages": Check("training.doctor.checks:packages"),
    "recipes": Check("training.doctor.te:recipes", ("torch",)),
    "attention": Check("training.doctor.te:attention", ("torch", "gpu", "te")),
    "gemm": Check("training.doctor.speed:gemm_speed", ("torch", "gpu"), timed=True),
    "layer": Check("training.doctor.speed:layer_speed", ("torch", "gpu", "te"), timed=True),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m training.doctor", description=__doc__.split("\n")[0])
    parser.add_argument("--no_speed", action="store_true", help="leave out what is timed, about ten seconds")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    args = parser.parse_args(argv)
    found: list[tuple[str, Finding]] = []
    wanted = {name: check for name, check in CHECKS.items() if not (check.timed and args.no_speed)}
    for name, findings in supervise(wanted):
        found += [(name, finding) for finding in findings]
        for number, finding in enumerate(() if args.json else findings):
            print(render(name if number == 0 else "", finding), flush=True)
    faults = [finding for _, finding in found if finding.status == "fault"]
    code = int(bool(faults))
    if args.json:
        rows = [{"check": name, **asdict(finding)} for name, finding in found]
        print(json.dumps({"exit_code": code, "findings": rows}, indent=2))
    else:
        print("\n".join(cures(faults)))
    return code


def render(name: str, finding: Finding) -> str:
    head = f"{LABELS[finding.status]:<6}{name:<11}"
    text = finding.text
    if finding.status == "warn" and finding.cure:
        text += f" (see: {finding.cure})"
    lines = textwrap.wrap(text, WIDTH - len(head), break_long_words=False, break_on_hyphens=False)
    # Aligned columns, as the recipes have them, must keep their spaces.
    return head + ("\n" + " " * len(head)).join(lines if len(text) > WIDTH - len(head) else [text])


def cures(faults: list[Finding]) -> list[str]:
    """A command per fault, in the order in which to run them; one that cures several stands once."""
    if not faults:
        return ["healthy: nothing is broken"]
    lines = [f"{len(faults)} broken; what cures it:"]
    commands = dict.fromkeys(finding.cure for finding in faults if finding.cure)
    lines += [f"{number}. {command}" for number, command in enumerate(commands, 1)]
    if not all(finding.cure for finding in faults):
        lines.append("No cure is known for the others; their messages stand above.")
    return lines


def examine(checks: dict[str, Check]) -> Iterator[tuple[str, list[Finding], bool]]:
    """(check, findings, whether it raised), one by one, in this process."""
    for name, check in checks.items():
        findings: list[Finding] = []
        raised = False
        try:
            if not any(LACKING[need]() for need in check.needs):
                module, function = check.function.split(":")
                for finding in getattr(import_module(module), function)():
                    findings.append(finding)
        except Exception as error:
            raised = True
            text = f"this check failed: {type(error).__name__}: {first_line(error)}"
            findings.append(Finding("fault", text))
        yield name, findings, raised


def supervise(checks: dict[str, Check]) -> Iterator[tuple[str, list[Finding]]]:
    """Every check with its findings, whatever becomes of the processes that run them."""
    left = dict(checks)
    with tempfile.TemporaryDirectory() as folder:
        # Chatter of libraries would hide the report; TE's debug output is asked for to be read.
        log = None if os.environ.get("NVTE_DEBUG") == "1" else Path(folder) / "output"
        while left:
            for name, findings in _answers(dict(left), log):
                del left[name]
                yield name, findings


def _answers(checks: dict[str, Check], log: Path | None) -> Iterator[tuple[str, list[Finding]]]:
    """Findings from one process, until all are there or the process is of no more use; at least one."""
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(checks, sender, log), daemon=True)
    process.start()
    sender.close()
    try:
        for name in checks:
            if not receiver.poll(SECONDS):
                yield name, [Finding("fault", f"this check hangs: no answer in {SECONDS} s")]
                return
            try:
                findings, raised = receiver.recv()
            except EOFError:
                process.join()
                how = _ending(process.exitcode, log)
                yield name, [Finding("fault", f"this check ended its process: {how}")]
                return
            yield name, findings
            if raised:  # a CUDA error spoils every later call in its process
                return
    finally:
        process.kill()
        process.join()


def _work(checks: dict[str, Check], sender: Connection, log: Path | None) -> None:
    if log:
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    for _, findings, raised in examine(checks):
        sender.send((findings, raised))
        if raised:
            return


def _ending(code: int | None, log: Path | None) -> str:
    """How a process died, and the last line that it wrote."""
    how = signal.Signals(-code).name if code and code < 0 else f"exit code {code}"
    written = log.read_text(encoding="utf-8", errors="replace").split("\n") if log and log.exists() else []
    last = next((line.strip() for line in reversed(written) if line.strip()), "")
    return f"{how}{f' ({last})' if last else ''}"
