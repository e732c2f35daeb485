"""Signals that ask a run to save and stop."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>
# Schedulers and torchrun may each send a signal to the same process: these are one request.
SAME_SIGNAL_SECONDS = 1.0


def stop_signals() -> list[signal.Signals]:
    """Return SIGTERM, SIGINT, and SIGHUP unless it is ignored, as under nohup."""
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hangup]


def stop_with_parent() -> None:
    """Receive SIGTERM when the parent process dies, on Linux.

    torchrun starts its workers in sessions of their own: they would survive its SIGKILL and keep their GPUs.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died just now
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def handling_stop_signals(handle: Callable[[int, Any], None]) -> Iterator[None]:
    """Route stop signals to `handle`; programs started inside keep the default handlers."""
    before = {number: signal.signal(number, handle) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def announcing_stop_signals(react: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call `react` for each stop signal at once, from a thread.

    A Python signal handler runs only when the main thread returns from C: a CUDA synchronization or a file
    write may take minutes. Use in the main thread.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def listen() -> None:
        while (number := os.read(reader, 1)[0]) != 0:
            if number in stop_signals():
                react(signal.Signals(number))

    thread = threading.Thread(target=listen, daemon=True, name="stop signals")
    thread.start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(writer, b"\0")
        thread.join()
        os.close(reader)
        os.close(writer)


class Stopped(BaseException):
    """Raised when a stop signal arrives while waiting for data. Libraries swallow plain Exceptions."""


class StopFlag:
    """Flag set by SIGTERM, SIGINT or SIGHUP; a second signal ends the process.

    A signal interrupts waiting for data, but never a step.
    """

    def __init__(self, *, announces: bool = True):
        self.requested = False
        self.remaining_work = "the current step and saving"  # done after the first signal
        self._announces, self._first_signal = announces, 0.0  # time of the first signal
        # PID of the waiting process. Forked loader workers inherit the handler and must not raise.
        self.waiting_pid: int | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Set the flag on stop signals, with an announcement. Use in the main thread."""
        with handling_stop_signals(self), announcing_stop_signals(self.announce):
            yield

    def __call__(self, number: int, frame: Any) -> None:
        self.requested = True
        if self.waiting_pid == os.getpid():
            self.waiting_pid = None
            raise Stopped

    def announce(self, number: signal.Signals) -> None:
        """Print what happens now; end the process if this is the second signal."""
        now, first = time.monotonic(), not self._first_signal
        if first:
            self.requested, self._first_signal = True, now
            message = f"{number.name}: finishing {self.remaining_work} first; send it again to end at once"
        elif now - self._first_signal < SAME_SIGNAL_SECONDS:
            return
        else:
            message = f"{number.name} again: ended at once; checkpoints saved before are intact"
        if self._announces:
            with suppress(OSError):
                os.write(2, f"{message}\n".encode())
        if not first:
            os._exit(128 + number)  # the exit code of shells

    def wait_for(self, work: Callable[[], Any], *, interruptible: bool) -> Any:
        """Return `work()`, or raise Stopped if a signal arrives first."""
        self.waiting_pid = os.getpid() if interruptible else None
        try:
            if interruptible and self.requested:
                raise Stopped
            return work()
        finally:
            self.waiting_pid = None


# A forked data-loader worker must not report its own signals through its parent's pipe.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
