"""Entry point of the training commands. Parses flags before importing torch, so that --help is fast."""

from __future__ import annotations

import gc
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
    """Run the command and exit the process. For `start` and `started` see `training.run.main`."""
    cfg = parse_early(description)
    gc.disable()  # Collecting while libraries load takes a fifth of the time and frees nothing.
    try:
        from training.outcome import exit_process
        from training.run import main
    except KeyboardInterrupt:
        print("error: interrupted before the start", file=sys.stderr)
        sys.exit(130)  # 128 + SIGINT, as in shells
    gc.freeze()
    gc.enable()
    exit_process(main(sys.argv[1:], description=description, start=start, started=started, cfg=cfg))


def parse_early(description: str) -> Config | None:
    """Parse the command line; exit after --help or an error.

    Returns None under torchrun, where one rank reports errors for all.
    """
    argv = sys.argv[1:]
    if {"-h", "--help"} & set(argv):
        argv = ["--help"]
    elif "RANK" in os.environ:
        return None
    try:
        return parse_config(argv, prog=Path(sys.argv[0]).name, description=description)
    except UserError as error:
        print(f"error: {redact(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
