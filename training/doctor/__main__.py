"""Print on one screen what this machine can train, what is broken, and the commands that fix it.

python -m training.doctor

Exit code 0: healthy, also without a GPU (TE layers and FP8 are emulated there); 1: something is broken.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
from importlib.util import find_spec

from fp8_suite.core.packages import hide_interrupts
from fp8_suite.training.doctor import checks

CHECKS = ("machine", "packages", "gpus", "te", "recipes")  # the last three import torch


def main(argv: list[str] | None = None) -> int:
    """Run the checks, print their findings as they come, and return the exit code."""
    hide_interrupts()
    faulthandler.enable()  # a library that crashes is named
    summary = (__doc__ or "").split("\n")[0]
    argparse.ArgumentParser(prog="python -m training.doctor", description=summary).parse_args(argv)
    findings: list[checks.Finding] = []
    for name in CHECKS if find_spec("torch") else CHECKS[:2]:
        for finding in getattr(checks, f"check_{name}")():
            findings.append(finding)
            label = finding.status.upper() if finding.status == "fault" else finding.status
            print(f"{label:<6}{name:<9}{finding.text}", flush=True)
    faults = sum(finding.status == "fault" for finding in findings)
    print(f"{faults} broken" if faults else "healthy: nothing is broken")
    for word, status in (("to fix", "fault"), ("to install what is missing", "note")):
        cures = (finding.cure for finding in findings if finding.cure and finding.status == status)
        for command in dict.fromkeys(cures):
            print(f"{word}: {command}")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
