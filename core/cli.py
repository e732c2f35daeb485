"""Command lines with one-line errors."""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args, get_origin

from fp8_suite.core.errors import EXIT_BAD_SETTING, EXIT_INTERRUPTED, UserError
from fp8_suite.core.settings import Setting, check_bounds, convert, nearest, split_hint


class OneLineParser(argparse.ArgumentParser):
    """ArgumentParser whose errors are a UserError: one line without the usage, with the nearest flag."""

    def error(self, message: str) -> typing.NoReturn:
        raise UserError(message.removeprefix("argument "), exit_code=EXIT_BAD_SETTING)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        namespace, unknown = self.parse_known_args(args, namespace)
        if not unknown:
            return namespace
        flags = [option for action in self._actions for option in action.option_strings]
        word = unknown[0].split("=")[0]
        kind = "unknown flag" if word.startswith("-") else "unexpected argument"
        raise UserError(f"{kind} {word}{nearest(word, flags)}", exit_code=EXIT_BAD_SETTING)


class Switch(argparse.Action):
    """--name turns a setting on, --no_name off: flags win over a YAML file either way."""

    def __init__(self, option_strings: list[str], dest: str, **kwargs: Any):
        super().__init__(option_strings, dest, nargs=0, **kwargs)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, not str(option_string).startswith("--no_"))


def add_setting(group: Any, name: str, setting: Setting) -> None:
    """Add a setting's flag, absent from the parsed result unless given, with its default in the help."""
    kind, single_values = split_hint(setting.type)
    text, default = setting.field.metadata["help"].replace("%", "%%"), setting.field.default
    if default is not None and "default:" not in text:
        shown = {True: "on", False: "off"}[default] if kind is bool else default
        text += f" (default: {shown})"
    common = {"dest": name, "default": argparse.SUPPRESS, "help": text}
    if kind is bool:
        group.add_argument(f"--{name}", f"--no_{name}", action=Switch, **common)
        return
    choices = ",".join(get_args(kind)) if get_origin(kind) is Literal else ""
    metavar = f"{{{choices}}}" if choices else {int: "N", float: "X"}.get(kind, "TEXT")
    group.add_argument(f"--{name}", metavar="|".join([metavar, *filter(None, single_values)]), **common)


def as_command(work: Callable[[list[str]], int]) -> Callable[[list[str] | None], int]:
    """Decorate a command's main function: it reads sys.argv by default, and an error is one line."""

    @functools.wraps(work)
    def main(argv: list[str] | None = None) -> int:
        try:
            return work(sys.argv[1:] if argv is None else argv)
        except KeyboardInterrupt as stop:
            print(str(stop) or "interrupted", file=sys.stderr)
            return EXIT_INTERRUPTED
        except BrokenPipeError:  # a reader such as `head` closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        except (UserError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return getattr(error, "exit_code", EXIT_BAD_SETTING)

    return main


def command_parser(prog: str, description: str, *, trains: bool = False) -> OneLineParser:
    """Return a parser for a command's own flags; with `trains`, --help mentions the training flags."""
    epilog = "All training flags are accepted too: python train_fp8.py --help" if trains else None
    first = description.splitlines()[0]
    return OneLineParser(prog=prog, allow_abbrev=False, description=first, epilog=epilog)


def add_number(
    parser: argparse.ArgumentParser,
    name: str,
    default: float | None,
    text: str,
    *,
    kind: type = int,
    **bounds: float,
) -> None:
    """Add a flag for a finite number within `bounds`, by default of at least 1, with its default in the help.

    `bounds` are those of a setting.
    """

    def parse(word: str) -> float:
        check_bounds(name, value := convert(name, word, kind), bounds or {"minimum": 1})
        return value

    shown = text if default is None else f"{text} (default: {default:g})"
    metavar = "N" if kind is int else "X"
    parser.add_argument(f"--{name}", type=parse, default=default, metavar=metavar, help=shown)
