"""Signals that ask a run to save and stop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def stop_signals() -> list[signal.Signals]:
    """Return SIGTERM, SIGINT, and SIGHUP unless it is ignored, as under nohup."""
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hangup]


@contextmanager
def caught(handle: Callable[[int, Any], None] = lambda number, frame: None) -> Iterator[None]:
    """Route stop signals to `handle`; programs started inside keep the default handlers."""
    before = {number: signal.signal(number, handle) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
