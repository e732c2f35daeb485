"""How a run ends: exit codes, and errors as the one line that a user can act on."""

from __future__ import annotations

import atexit
import io
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from core.errors import EXIT_BAD_SETTING, EXIT_FAILED, EXIT_OUT_OF_MEMORY, UserError, first_line
from core.packages import ROOT
from core.redact import redact
from core.signals import stopping
from training.parallel import ranks

# torchrun ends a node's ranks as soon as one is gone, and the one that tells of a bad setting may be last.
SECONDS_TO_BE_TOLD = 3.0

OUT_OF_MEMORY = (
    "Try a smaller --batch_size with more --gradient_accumulation_steps, --gradient_checkpointing, a shorter "
    "--max_seq_length, --moment_dtype bf16, --grad_reduce_dtype bf16 or --no_fp8_weight_cache with "
    "accumulation, or more sharding (--sharding_mode fsdp_full); where little is missing, set "
    "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment"
)


LOST_WORKER = (
    "Linux ends processes so where memory runs out: lower --num_workers, or give the job more host memory; "
    "the same command with this run's --output_dir goes on from the last checkpoint"
)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Inside, the run outlives whatever reads its output: a pipe, or a terminal that is closed."""
    before = [stream or _nowhere() for stream in (sys.stdout, sys.stderr)]  # None: closed at the start
    for stream in before:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a path may have letters that a terminal has not
    sys.stdout, sys.stderr = map(_Lasting, before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _nowhere() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.FileIO(os.devnull, "w"))


class _Lasting:
    """A text stream that leads nowhere once writing to it has failed."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, use: Callable[[], Any]) -> None:
        try:
            use()
        except OSError:
            with suppress(OSError, ValueError):  # what is in its buffer, too
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def exit_process(code: int) -> NoReturn:
    """sys.exit for a run: exit handlers run and output is flushed, but Python is not torn down.

    A process group that something still refers to keeps Gloo's threads, and one that lets go of its last
    tensor while Python is torn down aborts the process, after all is saved and with another exit code
    (https://github.com/pytorch/pytorch/pull/179291).
    """
    for number in stopping():  # what ends here has its exit code
        signal.signal(number, signal.SIG_IGN)
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def end(error: BaseException, watchdog: Any | None, close: Callable[[], None] = lambda: None) -> int:
    """Say why the run ends, once for all ranks, and return the exit code; one of many ranks ends here.

    `close` is called once that is said. Errors that are not for users come with their traceback: on one
    device by being raised again.
    """
    say = partial(_say, error, watchdog=watchdog, close=close)
    if isinstance(error, KeyboardInterrupt):
        message = "interrupted outside the training loop; what was saved before is intact"
        return say(message, 130)
    if isinstance(error, torch.OutOfMemoryError):
        return say(f"{first_line(error)} {OUT_OF_MEMORY}", EXIT_OUT_OF_MEMORY)
    if "DataLoader worker (pid" in str(error):  # torch has no class for it
        return say(f"{first_line(error)} {LOST_WORKER}", EXIT_FAILED)
    if _lost_a_rank(error):
        if watchdog is not None and (gone := watchdog.gone()):
            return say(gone, EXIT_FAILED, own=False)
        return say(f"another rank is gone or does not answer ({first_line(error)})", EXIT_FAILED)
    if isinstance(error, UserError):
        return say(str(error), error.exit_code)
    if _raised_here(error) and isinstance(error, (ValueError, RuntimeError)):
        code = EXIT_BAD_SETTING if isinstance(error, ValueError) else EXIT_FAILED
        return say(str(error), code)
    if ranks.world_size() == 1:
        if watchdog is None:  # of many ranks, maybe, before they met
            message = redact(f"{type(error).__name__}: {first_line(error)}")
            ranks.will_not_come(message, bad_setting=False)
        close()
        raise error
    details = getattr(error, "details", None) or "".join(traceback.format_exception(error))
    return say(f"{type(error).__name__}: {error}", EXIT_FAILED, details=details)


def _say(
    error: BaseException,
    message: str,
    code: int,
    *,
    watchdog: Any | None,
    close: Callable[[], None],
    own: bool = True,
    details: str = "",
) -> int:
    """Print it, if this rank is the first that fails, and end without waiting for the others.

    `own`: it is said of the ranks that failed, or of this one, whose name then comes first.
    """
    message, many = redact(message), ranks.world_size() > 1
    if watchdog is None:  # before the ranks met
        shared = code == EXIT_BAD_SETTING and os.environ.get("LOCAL_RANK", "0") != "0"
        if not shared:  # a node's ranks read the same settings
            name = f"rank {os.environ['RANK']} ({platform.node()}): " if "RANK" in os.environ else ""
            print(f"error: {name if code != EXIT_BAD_SETTING else ''}{message}", file=sys.stderr, flush=True)
        else:
            time.sleep(SECONDS_TO_BE_TOLD)
        ranks.will_not_come(message, bad_setting=code == EXIT_BAD_SETTING)
        return code
    failed = getattr(error, "ranks", {ranks.rank(): platform.node()})
    if own and many and len(failed) < ranks.world_size():
        number, host = min(failed.items())
        message = f"rank {number}{f' ({host})' if host else ''}: {message}"
    if watchdog.fail(message):
        print(f"{redact(details)}error: {message}", file=sys.stderr, flush=True)
    close()
    if many:
        sys.stdout.flush()
        os._exit(code)  # an orderly exit would wait for ranks that wait for this one
    return code


def _lost_a_rank(error: BaseException) -> bool:
    """Whether a collective failed; Gloo has no error class of its own."""
    return isinstance(error, dist.DistError) or (not _raised_here(error) and "/gloo/" in str(error))


def _raised_here(error: BaseException) -> bool:
    """Whether our own code raised it, on whichever rank: for users, where others need their traceback."""
    raised = getattr(error, "origin", None) or traceback.extract_tb(error.__traceback__)[-1].filename
    path = Path(raised).resolve()
    return path.is_relative_to(ROOT) and "site-packages" not in path.parts
