"""What a command answers before torch is imported, which takes seconds: --help, and wrong settings."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from training.config import parse_config
from training.errors import EXIT_BAD_SETTING
from training.trackers import redact


def answer_early(description: str) -> None:
    """Exit with the help or the error that the command line asks for, if it does.

    The ranks of a launcher are left to find the error together, and a file of settings is left to be read
    once: it may be a pipe.
    """
    argv = sys.argv[1:]
    if {"-h", "--help"} & set(argv):
        argv = ["--help"]
    elif "RANK" in os.environ or any(word.partition("=")[0] == "--config" for word in argv):
        return
    try:
        parse_config(argv, prog=Path(sys.argv[0]).name, description=description)
    except ValueError as error:
        print(f"error: {redact(str(error))}", file=sys.stderr)
        sys.exit(EXIT_BAD_SETTING)
