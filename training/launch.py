"""Start of a command. Flags are parsed before torch is imported, so that --help answers at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from core.errors import UserError
from core.redact import redact
from training.config import Config, parse_config

if TYPE_CHECKING:
    import torch


def launch(description: str, *, start: Callable[[Config], torch.device], started: float) -> NoReturn:
    """Run the command and exit the process; `start` and `started` are those of `training.run.main`."""
    answer_early(description)
    try:
        from training.outcome import exit_process
        from training.run import main
    except KeyboardInterrupt:
        print("error: interrupted before the start", file=sys.stderr)
        sys.exit(130)  # no run has begun, so exit as shells do
    exit_process(main(sys.argv[1:], description=description, start=start, started=started))


def answer_early(description: str) -> None:
    """Exit if the command line asks for help or has an error.

    Skipped under torchrun, whose ranks report an error once, and with --config: the file may be a pipe, which
    can be read only once.
    """
    argv = sys.argv[1:]
    if {"-h", "--help"} & set(argv):
        argv = ["--help"]
    elif "RANK" in os.environ or any(word.partition("=")[0] == "--config" for word in argv):
        return
    try:
        parse_config(argv, prog=Path(sys.argv[0]).name, description=description)
    except UserError as error:
        print(f"error: {redact(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
