"""Which signals ask a run to save and stop, and what they do meanwhile."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def stopping() -> list[signal.Signals]:
    """SIGTERM, SIGINT, and SIGHUP unless it is ignored, as nohup has it."""
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


@contextmanager
def caught(handle: Callable[[int, Any], None] = lambda number, frame: None) -> Iterator[None]:
    """Inside, these signals call `handle` and do nothing else. Programs started inside are not affected."""
    before = {number: signal.signal(number, handle) for number in stopping()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
