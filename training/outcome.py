"""Error reports and exit codes at the end of a run."""

from __future__ import annotations

import atexit
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
from fp8_suite.core.errors import EXIT_BAD_SETTING, EXIT_FAILED, EXIT_OUT_OF_MEMORY, UserError, first_line
from fp8_suite.core.redact import redact
from fp8_suite.core.signals import stop_signals
from fp8_suite.data import loader
from fp8_suite.training.parallel import ranks
from fp8_suite.training.parallel.watchdog import Watchdog

# torchrun kills a node's other ranks as soon as one exits: local rank 0 needs time to print the error first.
ERROR_REPORT_DELAY_SECONDS = 3.0

INTERRUPTED = "interrupted before or after training; earlier checkpoints are intact"
OUT_OF_MEMORY = (
    "Try a smaller --batch_size with more --gradient_accumulation_steps, --recompute layer (or auto for "
    "both; if they were auto, a lower --memory_limit_gb), a shorter --max_seq_length, --moment_dtype fp8, "
    "--offload_optimizer (on one GPU with --fp8_weights, which is all that LoRA needs), --grad_reduce_dtype "
    "bf16 with accumulation, or more sharding (--sharding_mode fsdp_full)"
)
LOST_WORKER = (
    "The kernel's OOM killer usually does this: lower --num_workers, or give the job more host memory; then "
    "rerun with the same --output_dir to resume from the last checkpoint"
)


@contextmanager
def ignore_broken_pipes() -> Iterator[None]:
    """Keep the run alive when stdout or stderr is a closed pipe or terminal."""
    streams = sys.stdout, sys.stderr
    for stream in streams:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # paths may contain unencodable characters
    sys.stdout, sys.stderr = map(_NonFailingStream, streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


class _NonFailingStream:
    """Text stream that discards output which cannot be written."""

    def __init__(self, stream: Any):
        self._stream = stream  # None if it was closed before the start

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError, AttributeError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, AttributeError):
            self._stream.flush()


def exit_process(code: int) -> NoReturn:
    """Run exit handlers, flush output and exit without interpreter shutdown.

    Gloo threads of a process group that is still referenced can abort the interpreter's shutdown and change
    the exit code (https://github.com/pytorch/pytorch/pull/179291).
    """
    for number in stop_signals():  # a signal must not change the exit code any more
        signal.signal(number, signal.SIG_IGN)
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def report_failure(
    error: BaseException, watchdog: Watchdog | None, close: Callable[[], None] = lambda: None
) -> int:
    """Print why the run failed, once for all ranks. Return the exit code, or exit if there are other ranks.

    `watchdog` is None before the process group exists. `close` is called after the report. Unexpected errors
    keep their traceback; on one device they are re-raised.
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
    elif lost := _lost_ranks(error, watchdog):
        message, failed = lost, {}
    elif isinstance(error, dist.DistError):
        message, failed = f"another rank has exited or does not respond ({first_line(error)})", {}
    elif ranks.world_size() == 1:
        if watchdog is None:  # other ranks wait for this one to join
            ranks.report_failed_start(redact(f"{type(error).__name__}: {first_line(error)}"))
        close()
        raise error
    else:
        message = f"{type(error).__name__}: {error}"
        details = getattr(error, "details", None) or "".join(traceback.format_exception(error))
    message = redact(message)
    if watchdog is None:
        _report_failed_start(message, code)
        return code
    if 0 < len(failed) < ranks.world_size():
        rank, host = min(failed.items())
        message = f"rank {rank}{f' ({host})' if host else ''}: {message}"
    if watchdog.fail():  # the first rank that fails
        print(f"{redact(details)}error: {message}", file=sys.stderr, flush=True)
    close()
    if ranks.world_size() > 1:
        sys.stdout.flush()
        os._exit(code)  # a normal exit could deadlock with ranks that wait for this one
    return code


def _report_failed_start(message: str, code: int) -> None:
    """Print the error and send it to the ranks that wait for this one to join."""
    bad_setting = code == EXIT_BAD_SETTING  # identical on all ranks of a node: local rank 0 prints it
    if bad_setting and ranks.under_torchrun() and os.environ["LOCAL_RANK"] != "0":
        time.sleep(ERROR_REPORT_DELAY_SECONDS)
    else:
        name_rank = "RANK" in os.environ and not bad_setting
        name = f"rank {os.environ['RANK']} ({platform.node()}): " if name_rank else ""
        print(f"error: {name}{message}", file=sys.stderr, flush=True)
    ranks.report_failed_start(message, code)


def _lost_ranks(error: BaseException, watchdog: Watchdog | None) -> str | None:
    """Name the ranks that died if `error` is the plain RuntimeError that Gloo raises then, else None."""
    if watchdog is None or not isinstance(error, RuntimeError) or hasattr(error, "ranks"):
        return None  # errors with `ranks` have another cause
    return watchdog.lost_ranks()
