"""What ends a job of many ranks when one fails, dies or stalls: within a bounded time, and saying who.

Every rank tells the job's store where it is. A rank that fails leaves its message there, and the others stop
instead of waiting for it in a collective. Each rank also listens for the next one, and ends the job when that
falls silent. One that makes no progress for --timeout_minutes looks up where the others are and ends the job
with the name of the one that is behind.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from core.errors import EXIT_FAILED
from training.parallel import ranks

T = TypeVar("T")

# A part of the start may take as long where --timeout_minutes is less.
DATA_SECONDS = 6 * 3600.0  # one rank may tokenise while the others wait
START_SECONDS = 2 * 3600.0  # any other, such as reading a large model over a slow network
GRACE_SECONDS = 10.0  # for a rank that hears of another's failure to end on its own
LOOKS = 4  # pauses that a rank without progress takes to see which others go on
SILENCE_SECONDS = 60.0  # after which a rank that said something every two seconds is taken for dead
RESTING = "waiting for the others"


@dataclass(frozen=True)
class Place:
    """Where a rank is: the count of its beats, what it does, and for how long."""

    beats: int
    doing: str
    host: str
    seconds: float
    told: int  # how often the rank has said so; clocks of hosts differ

    def describe(self, rank: int, *, silent: bool = False) -> str:
        name = f"rank {rank} ({self.host})"
        if silent:
            return f"{name} is not heard of any more, last {self.doing}"
        return f"{name} {self.doing} for {self.seconds:.0f} s"


class Watchdog:
    """One thread beside the main one; without other ranks it does nothing."""

    def __init__(self, timeout_minutes: float):
        self.timeout = 60 * timeout_minutes
        self.pause = min(2.0, self.timeout / 10)
        self._beats, self._doing, self._since, self._told = 0, "starting", None, 0
        self._limit = self.timeout  # of what is done now
        self._next, self._heard = None, time.monotonic()  # the next rank's last place, and since when it is
        self._ended = threading.Event()
        self._store = None
        if ranks.world_size() > 1:
            self._store = ranks.connection()
            self._store.set_timeout(timedelta(seconds=10))
            self._lock = threading.Lock()
            self._tell()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    def beat(self, doing: str, *, counts: bool = True, limit: float = 0.0) -> None:
        """The main thread is alive and does this next; the first call starts the clock.

        It may take --timeout_minutes, or `limit` seconds if those are more. What not all ranks do as often
        must not count: a rank with fewer beats is taken to be behind.
        """
        self._beats, self._doing, self._since = self._beats + counts, doing, time.monotonic()
        self._limit = max(self.timeout, limit)

    def starting(self, doing: str) -> None:
        """A beat before the first step."""
        self.beat(doing, limit=START_SECONDS)

    def run_on_all_ranks(self, doing: str, work: Callable[[], T], limit: float | None = None) -> list[T]:
        """`ranks.run_on_all_ranks` before the first step; a rank late with `work` counts as behind."""
        limit = START_SECONDS if limit is None else limit

        def watched() -> T:
            self.beat(doing, limit=limit)
            result = work()
            self.beat(f"waiting after {doing}", limit=limit)
            return result

        return ranks.run_on_all_ranks(watched)

    def run_on_rank0(self, doing: str, work: Callable[[], T]) -> T:
        """`ranks.run_on_rank0` before the first step, watched over in the same way."""
        return self.run_on_all_ranks(doing, lambda: work() if ranks.rank() == 0 else None)[0]

    def rest(self) -> None:
        """No progress is expected until the next beat."""
        self._doing, self._since = RESTING, None

    def close(self) -> None:
        self._ended.set()
        if self._store is not None:
            self._thread.join()
            self._store = None

    def fail(self, message: str) -> bool:
        """Tell the others; True for the first rank that does, whose message is the one to print."""
        if self._store is None:
            return True
        with self._lock:
            try:
                first = self._store.add("watchdog/failures", 1) == 1
                if first:
                    self._store.set("watchdog/failure", message)
            except (dist.DistError, RuntimeError):
                return True  # nobody is left to tell
        return first

    def gone(self) -> str | None:
        """Who fell silent, for a rank whose collective failed; None if nobody did, or a rank has said why."""
        if self._store is None:
            return None
        try:
            with self._lock:
                failed = self._store.check(["watchdog/failure"])
            places, silent = ({}, set()) if failed else self._look_around()
        except (dist.DistError, RuntimeError):
            return None
        if not silent:
            return None
        names = [f"rank {rank} ({places[rank].host})" for rank in sorted(silent)]
        how = "is gone: it was killed, or its node is lost"
        if len(names) > 1:
            how = "are gone: they were killed, or their node is lost"
        return f"{_listed(names, ', ')} {how}. {AFTERWARDS}"

    def _watch(self) -> None:
        answered = time.monotonic()
        while not self._rest():
            began = time.monotonic()
            try:
                with self._lock:
                    self._tell()
                    failed = self._store.check(["watchdog/failure"])
                if failed:
                    self._ended.wait(GRACE_SECONDS)
                    self._exit()
                message = self._dead() or self._stalled()
                looked = time.monotonic() - began - LOOKS * self.pause
                if message and not self._forgive(looked):
                    if self.fail(message):
                        print(f"error: {message}", file=sys.stderr, flush=True)
                    self._exit()
                answered = time.monotonic()
            except (dist.DistError, RuntimeError):  # a slow store is not a lost one
                if self._overdue() and time.monotonic() - answered > SILENCE_SECONDS:
                    print(f"error: {lost(self.timeout, self._limit)}", file=sys.stderr, flush=True)
                    self._exit()

    def _rest(self) -> bool:
        """Wait a while; True once the watchdog is closed."""
        began = time.monotonic()
        ended = self._ended.wait(self.pause)
        self._forgive(time.monotonic() - began - self.pause)
        return ended

    def _forgive(self, away: float) -> bool:
        """Time that this process did not run, as schedulers suspend jobs, is nobody's delay."""
        if away <= 5 * self.pause:
            return False
        self._heard += away
        if self._since is not None:
            self._since += away
        return True

    def _dead(self) -> str | None:
        """What to say of the next rank if it has fallen silent."""
        rank = (ranks.rank() + 1) % ranks.world_size()
        place, now = self._places([rank]).get(rank), time.monotonic()
        if place != self._next:
            self._next, self._heard = place, now
        elif place and now - self._heard > SILENCE_SECONDS:
            return f"{place.describe(rank, silent=True)}: it was killed, or its node is gone. {AFTERWARDS}"
        return None

    def _overdue(self) -> bool:
        return self._since is not None and time.monotonic() - self._since > self._limit

    def _stalled(self) -> str | None:
        if not self._overdue():
            return None
        places, silent = self._look_around()
        if not self._overdue():
            return None
        return stalled(places, silent, ranks.world_size(), timeout=self.timeout, limit=self._limit)

    def _look_around(self) -> tuple[dict[int, Place], set[int]]:
        """Where all ranks are, and which of them have said nothing for some pauses."""
        everyone = list(range(ranks.world_size()))
        before = self._places(everyone)
        for _ in range(LOOKS):  # others listen to this rank meanwhile
            self._ended.wait(self.pause)
            with self._lock:
                self._tell()
        after = self._places(everyone)
        return after, {rank for rank, place in after.items() if place == before.get(rank)} - {ranks.rank()}

    def _exit(self) -> None:
        if not self._ended.is_set():
            sys.stdout.flush()
            os._exit(EXIT_FAILED)

    def _tell(self) -> None:
        since = self._since
        seconds = 0.0 if since is None else time.monotonic() - since
        self._told += 1
        place = Place(self._beats, self._doing, platform.node(), seconds, self._told)
        self._store.set(f"watchdog/{ranks.rank()}", json.dumps(vars(place)))

    def _places(self, numbers: list[int]) -> dict[int, Place]:
        with self._lock:
            keys = {number: f"watchdog/{number}" for number in numbers}
            known = {number: key for number, key in keys.items() if self._store.check([key])}
            return {number: Place(**json.loads(self._store.get(key))) for number, key in known.items()}


AFTERWARDS = "What was saved before is intact; the same command with this run's --output_dir goes on from it"


def lost(timeout: float, limit: float) -> str:
    return (
        f"--timeout_minutes {timeout / 60:g}: no progress for {limit:.0f} s on rank {ranks.rank()} "
        f"({platform.node()}), and the job's store does not answer: its host may be gone. {AFTERWARDS}"
    )


def stalled(
    places: dict[int, Place], silent: set[int], world_size: int, *, timeout: float, limit: float
) -> str:
    """Who holds the job up: ranks that said nothing yet, else those that fell silent, else those behind.

    Behind are those with the fewest beats that do not rest.
    """
    awake = {rank: place for rank, place in places.items() if place.doing != RESTING}
    least = min((place.beats for place in awake.values()), default=None)
    behind = [rank for rank, place in awake.items() if place.beats == least]
    unheard = [f"rank {rank} has not begun" for rank in range(world_size) if rank not in places]
    named = sorted(silent) or (behind if 0 < len(behind) < len(places) else [])
    shown = unheard or [places[rank].describe(rank, silent=rank in silent) for rank in (named or places)]
    who = ("" if unheard or named else "all ranks are in the same place: ") + _listed(shown, "; ")
    return f"--timeout_minutes {timeout / 60:g}: no progress for {limit:.0f} s; {who}. {AFTERWARDS}"


def _listed(names: list[str], between: str) -> str:
    more = [f"and {len(names) - 8} more"] if len(names) > 8 else []
    return between.join(names[:8] + more)
