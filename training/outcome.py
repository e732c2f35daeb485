"""The end of a run: exit codes, and errors as the one line that a user can act on."""

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
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from core.errors import EXIT_BAD_SETTING, EXIT_FAILED, EXIT_OUT_OF_MEMORY, UserError, first_line
from core.redact import redact
from core.signals import stop_signals
from data import loader
from training.parallel import ranks

# torchrun kills a node's other ranks as soon as one exits: local rank 0 needs time to print the error first.
ERROR_REPORT_DELAY_SECONDS = 3.0

INTERRUPTED = "interrupted outside the training loop; what was saved before is intact"
OUT_OF_MEMORY = (
    "Try a smaller --batch_size with more --gradient_accumulation_steps, --gradient_checkpointing, a shorter "
    "--max_seq_length, --moment_dtype bf16, --grad_reduce_dtype bf16 or --no_fp8_weight_cache with "
    "accumulation, or more sharding (--sharding_mode fsdp_full); if little is missing, set "
    "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment"
)
LOST_WORKER = (
    "The kernel's OOM killer usually does this: lower --num_workers, or give the job more host memory; then "
    "rerun with the same --output_dir to resume from the last checkpoint"
)


@contextmanager
def ignore_broken_pipes() -> Iterator[None]:
    """Keep the run alive when stdout or stderr is a closed pipe or terminal."""
    before = [stream or _null_stream() for stream in (sys.stdout, sys.stderr)]  # None: closed at the start
    for stream in before:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a path may have letters that the encoding lacks
    sys.stdout, sys.stderr = map(_LastingStream, before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _null_stream() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.FileIO(os.devnull, "w"))


class _LastingStream:
    """Text stream that discards all output once writing to it has failed."""

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
            with suppress(OSError, ValueError):  # also discards what its buffer holds
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def exit_process(code: int) -> NoReturn:
    """Run exit handlers, flush output and exit, without tearing Python down.

    Gloo threads of a process group that is still referenced can abort the interpreter's shutdown and change
    the exit code (https://github.com/pytorch/pytorch/pull/179291).
    """
    for number in stop_signals():  # the exit code is decided
        signal.signal(number, signal.SIG_IGN)
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def report_failure(
    error: BaseException, watchdog: Any | None, close: Callable[[], None] = lambda: None
) -> int:
    """Report why the run failed, once for all ranks; return the exit code, or exit if there are other ranks.

    `watchdog` is None until the ranks have met. `close` is called after the report. Unexpected errors keep
    their traceback; on one device they are raised again.
    """
    failed = getattr(error, "ranks", {ranks.rank(): platform.node()})
    code, details = EXIT_FAILED, ""
    if isinstance(error, KeyboardInterrupt):
        message, code = INTERRUPTED, 130
    elif isinstance(error, UserError):
        message, code = str(error), error.exit_code
    elif isinstance(error, torch.OutOfMemoryError):
        message, code = f"{first_line(error)} {OUT_OF_MEMORY}", EXIT_OUT_OF_MEMORY
    elif isinstance(error, RuntimeError) and any(w.exitcode == -signal.SIGKILL for w in loader.WORKERS):
        message = f"{first_line(error)} {LOST_WORKER}"
    # Gloo raises a plain RuntimeError if a collective loses a rank; errors with `ranks` have another cause.
    elif isinstance(error, RuntimeError) and not hasattr(error, "ranks") and (gone := _gone(watchdog)):
        message, failed = gone, {}
    elif isinstance(error, dist.DistError):
        message, failed = f"another rank is gone or does not answer ({first_line(error)})", {}
    elif ranks.world_size() == 1:
        if watchdog is None:  # ranks that wait for this one to join
            ranks.report_failed_start(redact(f"{type(error).__name__}: {first_line(error)}"))
        close()
        raise error
    else:
        message = f"{type(error).__name__}: {error}"
        details = getattr(error, "details", None) or "".join(traceback.format_exception(error))
    message = redact(message)
    if watchdog is None:
        _report_before_the_ranks_meet(message, code)
        return code
    if 0 < len(failed) < ranks.world_size():
        rank, host = min(failed.items())
        message = f"rank {rank}{f' ({host})' if host else ''}: {message}"
    if watchdog.fail():  # the first rank that fails
        print(f"{redact(details)}error: {message}", file=sys.stderr, flush=True)
    close()
    if ranks.world_size() > 1:
        sys.stdout.flush()
        os._exit(code)  # an orderly exit would wait for ranks that wait for this one
    return code


def _report_before_the_ranks_meet(message: str, code: int) -> None:
    """Print the error and pass it on to the ranks that wait for this one to join."""
    bad_setting = code == EXIT_BAD_SETTING  # the same on all ranks of a node: local rank 0 prints it
    if bad_setting and os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(ERROR_REPORT_DELAY_SECONDS)
    else:
        one_of_many = "RANK" in os.environ and not bad_setting
        name = f"rank {os.environ['RANK']} ({platform.node()}): " if one_of_many else ""
        print(f"error: {name}{message}", file=sys.stderr, flush=True)
    ranks.report_failed_start(message, code)


def _gone(watchdog: Any | None) -> str | None:
    return watchdog.gone() if watchdog is not None else None
