"""The exception for errors that a user can act on, exit codes, and helpers for error messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

EXIT_FAILED = 1
EXIT_BAD_SETTING = 2
EXIT_OUT_OF_MEMORY = 3  # GPU memory
EXIT_IN_USE = 4  # another process is writing to the run folder
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL: rerun the same command to resume
MAX_REASON = 300  # characters of a library's error in a message


class UserError(Exception):
    """An error that the user can act on: printed as one line, without a traceback.

    `flags` are the settings it is about. `exit_code` is EXIT_BAD_SETTING if other settings fix it, else
    EXIT_FAILED (the machine, files or another process are at fault).
    """

    # Set on any exception by `training.parallel.ranks.run_on_all_ranks` (`ranks` also by others that know the
    # failed ranks), absent before:
    ranks: dict[int, str | None]  # ranks that raised it -> their hosts, "" or None if unknown
    details: str  # traceback of the first of them

    def __init__(self, message: str, *, flags: Iterable[str] = (), exit_code: int = EXIT_FAILED):
        super().__init__(message)  # ranks pickle errors: the message only, the rest is in __dict__
        self.flags, self.exit_code = frozenset(flags), exit_code


def bad_setting(reason: str, **settings: Any) -> UserError:
    """Return the error `--name value ...: reason` about the given settings, with EXIT_BAD_SETTING."""
    shown = " ".join(as_flag(name, value) for name, value in settings.items())
    return UserError(f"{shown}: {reason}", flags=settings, exit_code=EXIT_BAD_SETTING)


@contextmanager
def without_flag(name: str) -> Iterator[None]:
    """Drop a leading `--name` from errors: the command takes the value by position."""
    try:
        yield
    except UserError as error:
        error.args = (str(error).removeprefix(f"--{name} "),)
        raise


def as_flag(name: str, value: Any) -> str:
    """Return a setting as it is written on the command line."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no_{name}"
    return f"--{name} {value}"


def counted(number: int, noun: str) -> str:
    """Return "1 row" or "2 rows" for the noun "row"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def first_line(error: BaseException) -> str:
    """Return the first line of the error's message, or its type if there is no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def one_line(error: BaseException) -> str:
    """Return the beginning of the error's message on one line, or its type if there is no message."""
    return " ".join(str(error).split())[:MAX_REASON].rstrip(".") or type(error).__name__


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and all errors in its chain of causes and contexts."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        cause = waiting.pop(0)
        if cause is not None and id(cause) not in seen:
            seen.add(id(cause))
            yield cause
            waiting += [cause.__cause__, cause.__context__]


def raise_interrupt(error: BaseException) -> None:
    """Raise KeyboardInterrupt if one caused `error`: libraries replace it with their own errors."""
    if any(isinstance(origin, KeyboardInterrupt) for origin in causes(error)):
        raise KeyboardInterrupt from error
