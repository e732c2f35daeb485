"""What ends a job of many ranks when one fails, dies or stalls: within a bounded time, and saying who.

Every rank tells the job's store where it is. A rank that fails leaves its message there, and the others stop
instead of waiting for it in a collective. A rank that makes no progress for --timeout_minutes looks up where
the others are and ends the job with the name of the one that is behind.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from training import ranks

EXIT_FAILED = 1
GRACE_SECONDS = 10.0  # for a rank that hears of another's failure to end on its own


@dataclass(frozen=True)
class Place:
    """Where a rank is: the count of its beats, what it does, and for how long."""

    beats: int
    doing: str
    host: str
    seconds: float
    told: float  # Unix time at which the rank said so

    def describe(self, rank: int, now: float, stale: float) -> str:
        name = f"rank {rank} ({self.host})"
        if now - self.told > stale:
            return f"{name} has not been heard of for {now - self.told:.0f} s, last {self.doing}"
        return f"{name} {self.doing} for {self.seconds:.0f} s"


class Watchdog:
    """One thread beside the main one; without other ranks it does nothing."""

    def __init__(self, timeout_minutes: float):
        self.timeout = 60 * timeout_minutes
        self.pause = min(2.0, self.timeout / 10)
        self._beats, self._doing, self._since = 0, "starting", None
        self._ended = threading.Event()
        self._store = None
        if ranks.world_size() > 1:
            self._store = ranks.connection()
            self._store.set_timeout(timedelta(seconds=30))
            self._lock = threading.Lock()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    def beat(self, doing: str) -> None:
        """The main thread is alive and does this next; the first call starts the clock."""
        self._beats, self._doing, self._since = self._beats + 1, doing, time.monotonic()

    def rest(self) -> None:
        """No progress is expected until the next beat."""
        self._since = None

    def close(self) -> None:
        self._ended.set()
        if self._store is not None:
            self._thread.join()

    def fail(self, message: str) -> bool:
        """Tell the others; True for the first rank that fails, whose message is the one to print."""
        if self._store is None:
            return True
        with self._lock:
            try:
                first = self._store.add("watchdog/failures", 1) == 1
                if first:
                    self._store.set("watchdog/failure", f"rank {ranks.rank()} ({platform.node()}): {message}")
            except (dist.DistError, RuntimeError):
                return True  # nobody is left to tell
        return first

    def _watch(self) -> None:
        while not self._ended.wait(self.pause):
            try:
                with self._lock:
                    self._tell()
                    failed = self._store.check(["watchdog/failure"])
                if failed:
                    self._ended.wait(GRACE_SECONDS)
                    self._exit()
                if self._since is not None and time.monotonic() - self._since > self.timeout:
                    message = self._who()
                    if self.fail(message):
                        print(f"error: {message}", file=sys.stderr, flush=True)
                    self._exit()
            except (dist.DistError, RuntimeError):
                return  # the launcher is gone, and ends this process too

    def _exit(self) -> None:
        if not self._ended.is_set():
            sys.stdout.flush()
            os._exit(EXIT_FAILED)

    def _tell(self) -> None:
        since = self._since
        seconds = 0.0 if since is None else time.monotonic() - since
        place = Place(self._beats, self._doing, platform.node(), seconds, time.time())
        self._store.set(f"watchdog/{ranks.rank()}", json.dumps(vars(place)))

    def _who(self) -> str:
        with self._lock:
            keys = {rank: f"watchdog/{rank}" for rank in range(ranks.world_size())}
            places = {r: Place(**json.loads(self._store.get(k))) for r, k in keys.items()}
        return stalled(places, timeout=self.timeout, stale=5 * self.pause, now=time.time())


def stalled(places: dict[int, Place], *, timeout: float, stale: float, now: float) -> str:
    """Who holds the job up: ranks that are silent, else those with the fewest beats."""
    silent = [rank for rank, place in places.items() if now - place.told > stale]
    least = min(place.beats for place in places.values())
    behind = [rank for rank, place in places.items() if place.beats == least]
    named = silent or (behind if len(behind) < len(places) else [])
    shown = [places[rank].describe(rank, now, stale) for rank in (named or places)]
    who = "; ".join(shown[:8]) + (f"; and {len(shown) - 8} more" if len(shown) > 8 else "")
    others = "" if named else "all ranks are in the same place: "
    return (
        f"--timeout_minutes {timeout / 60:g}: no progress for {timeout:.0f} s; {others}{who}. What was saved "
        "before is intact; the same command goes on from it"
    )
