"""Watchdog that ends a job when a rank fails, dies or stalls, and names the rank.

Every rank sends heartbeats to the job's store.

- A rank that fails records this in the store; the others exit instead of waiting for it in a collective.
- Each rank monitors the next one, and ends the job if its heartbeats stop.
- A rank without progress for --timeout_minutes compares the heartbeats of all ranks, and ends the job with
  the name of the rank that is behind.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch.distributed as dist
from fp8_suite.core.errors import EXIT_FAILED
from fp8_suite.training.parallel import ranks

T = TypeVar("T")

# Time limits of the phases before the first step; --timeout_minutes applies if it is longer.
DATA_SECONDS = 6 * 3600.0  # loading the data: one rank may tokenize while the others wait
START_SECONDS = 2 * 3600.0  # any other phase, such as reading a large model over a slow network
GRACE_SECONDS = 10.0  # for a rank to exit by itself after another rank has failed
INTERVALS_COMPARED = 4  # heartbeat intervals during which a rank without progress observes the others
SILENCE_SECONDS = 60.0  # a rank without heartbeats for this long is considered dead
PAUSED = "waiting for the others"
CAUSE_OF_DEATH = "the process was killed or its node failed"
RESUME_HINT = "Saved checkpoints are intact; rerun the command with this run's --output_dir to resume"
FAILURES = "watchdog/failures"  # store key with the number of ranks that failed


class Heartbeat(NamedTuple):
    """Latest state of a rank."""

    progress: int  # number of phases the rank has entered
    doing: str  # current phase, such as "computing step 7"
    host: str
    seconds: float  # time in this phase
    number: int  # counts heartbeats; clocks of different hosts cannot be compared

    def describe(self, rank: int, *, silent: bool = False) -> str:
        """Describe the rank's state; `silent` if its heartbeats have stopped."""
        if silent:
            return f"rank {rank} ({self.host}) stopped sending heartbeats while {self.doing}"
        return f"rank {rank} ({self.host}) has been {self.doing} for {self.seconds:.0f} s"


class Watchdog:
    """Thread that sends heartbeats and monitors the other ranks; inactive if there are none."""

    def __init__(self, timeout_minutes: float):
        self.timeout = 60 * timeout_minutes
        self.interval = min(2.0, self.timeout / 10)
        # Seconds of this process without those in which it was suspended, and the time of the last update.
        self._clock, self._updated = 0.0, time.monotonic()
        self._progress, self._doing, self._since, self._limit = 0, "starting", 0.0, math.inf
        self._sent = 0  # heartbeats
        self.phases: list[tuple[str, float]] = []  # before the first step, with time.perf_counter() at entry
        # The next rank's last heartbeat, and the time of its arrival.
        self._next: tuple[Heartbeat | None, float] = (None, 0.0)
        self.saving: Callable[[], bool] = lambda: False  # True while a save is written in the background
        self._closed = threading.Event()
        self._store = None
        if ranks.world_size() > 1:
            self._store = ranks.connection()
            self._store.set_timeout(timedelta(seconds=10))
            self._send()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    def beat(self, doing: str, *, counts: bool = True, limit: float = 0.0) -> None:
        """Enter a phase, which may last --timeout_minutes, or `limit` seconds if that is longer.

        Pass `counts=False` for phases that some ranks enter more often than others: the rank with the least
        progress is named.
        """
        self._progress, self._doing, self._since = self._progress + counts, doing, self._clock
        self._limit = max(self.timeout, limit)

    def starting(self, doing: str, limit: float | None = None) -> None:
        """Enter a phase before the first step, which may last START_SECONDS or `limit` seconds."""
        self.phases.append((doing, time.perf_counter()))
        self.beat(doing, limit=START_SECONDS if limit is None else limit)

    def pause(self) -> None:
        """Suspend the time limit until the next beat."""
        self.beat(PAUSED, counts=False, limit=math.inf)

    def run_on_all_ranks(self, doing: str, work: Callable[[], T], limit: float | None = None) -> list[T]:
        """Like `ranks.run_on_all_ranks`, before the first step; enters a phase before and after `work`."""

        def watched() -> T:
            self.starting(doing, limit)
            result = work()
            self.starting(f"waiting after {doing}", limit)
            return result

        return ranks.run_on_all_ranks(watched)

    def run_on_rank0(self, doing: str, work: Callable[[], T]) -> T:
        """Like `ranks.run_on_rank0`, in the same two phases."""
        return self.run_on_all_ranks(doing, lambda: work() if ranks.rank() == 0 else None)[0]

    def close(self) -> None:
        self._closed.set()
        if self._store is not None:
            self._thread.join()
            self._store = None

    def fail(self) -> bool:
        """Make the other ranks exit. Return True if this rank failed first and has to print its error."""
        try:
            return self._store is None or self._store.add(FAILURES, 1) == 1
        except (dist.DistError, RuntimeError):  # no connection to the store
            return True

    def lost_ranks(self) -> str | None:
        """Return an error that names the ranks without heartbeats, after a collective has failed.

        Return None if no heartbeats are missing, or if a rank has already reported its error.
        """
        try:
            if self._store is None or self._store.check([FAILURES]):
                return None
            beats, silent = self._compare()
        except (dist.DistError, RuntimeError):
            return None
        names = [f"rank {rank} ({beats[rank].host})" for rank in sorted(silent)]
        return f"lost {_join_names(names, ', ')}: {CAUSE_OF_DEATH}. {RESUME_HINT}" if names else None

    # The thread

    def _watch(self) -> None:
        last_response = self._clock  # time of the store's last answer
        while not self._wait():
            message = None
            try:
                self._send()
                if self._store.check([FAILURES]):
                    self._finish_save()
                    self._closed.wait(GRACE_SECONDS)
                    self._exit()
                message = self._dead() or self._stalled()
                last_response = self._clock
            except (dist.DistError, RuntimeError):  # the store may only be slow
                if self._overdue() and self._clock - last_response > SILENCE_SECONDS:
                    me = f"rank {ranks.rank()} ({platform.node()})"
                    lost = "the job's store does not respond: its host may have failed"
                    message = f"{self._no_progress()} on {me}, and {lost}. {RESUME_HINT}"
            if message:
                if self.fail():
                    print(f"error: {message}", file=sys.stderr, flush=True)
                self._exit()

    def _finish_save(self) -> None:
        """Wait for the save in the background: all ranks that live can finish it after one's error.

        Use no store meanwhile, which is gone if rank 0 exits first.
        """
        deadline = self._clock + self.timeout
        while self.saving() and self._clock < deadline and not self._wait():
            pass

    def _wait(self) -> bool:
        """Wait for a heartbeat interval. Return True if the watchdog has been closed."""
        closed = self._closed.wait(self.interval)
        now = time.monotonic()
        # A scheduler may suspend the process or the whole job. That time is not a stall.
        self._clock += min(now - self._updated, 5 * self.interval)
        self._updated = now
        return closed

    def _dead(self) -> str | None:
        """Return an error if the next rank has stopped sending heartbeats."""
        rank = (ranks.rank() + 1) % ranks.world_size()
        beat, (last, since) = self._read([rank]).get(rank), self._next
        if beat != last:
            self._next = beat, self._clock
        elif beat and self._clock - since > SILENCE_SECONDS:
            return f"{beat.describe(rank, silent=True)}: {CAUSE_OF_DEATH}. {RESUME_HINT}"
        return None

    def _overdue(self) -> bool:
        return self._clock - self._since > self._limit

    def _stalled(self) -> str | None:
        """Return an error if this rank makes no progress, not even while it observes the others."""
        if not self._overdue():
            return None
        beats, silent = self._compare()
        if not self._overdue():
            return None
        stragglers = name_stragglers(beats, silent, ranks.world_size())
        return f"{self._no_progress()}; {stragglers}. {RESUME_HINT}"

    def _no_progress(self) -> str:
        return f"--timeout_minutes {self.timeout / 60:g}: no progress for {self._limit:.0f} s"

    def _compare(self) -> tuple[dict[int, Heartbeat], set[int]]:
        """Return the heartbeats of all ranks, and the ranks that sent none for INTERVALS_COMPARED."""
        all_ranks = list(range(ranks.world_size()))
        before = self._read(all_ranks)
        for _ in range(INTERVALS_COMPARED):
            self._wait()
            self._send()
        after = self._read(all_ranks)
        return after, {rank for rank, beat in after.items() if beat == before.get(rank)} - {ranks.rank()}

    def _exit(self) -> None:
        if not self._closed.is_set():
            sys.stdout.flush()
            os._exit(EXIT_FAILED)

    def _send(self) -> None:
        self._sent += 1
        seconds = self._clock - self._since
        beat = Heartbeat(self._progress, self._doing, platform.node(), seconds, self._sent)
        self._store.set(f"watchdog/{ranks.rank()}", json.dumps(beat))

    def _read(self, numbers: list[int]) -> dict[int, Heartbeat]:
        keys = {number: f"watchdog/{number}" for number in numbers}
        known = {number: key for number, key in keys.items() if self._store.check([key])}
        return {number: Heartbeat(*json.loads(self._store.get(key))) for number, key in known.items()}


def name_stragglers(beats: dict[int, Heartbeat], silent: set[int], world_size: int) -> str:
    """Name the ranks that block the job: without any heartbeat, else silent, else with the least progress."""
    if missing := [f"rank {rank} has not started" for rank in range(world_size) if rank not in beats]:
        return _join_names(missing, "; ")
    active = {rank: beat.progress for rank, beat in beats.items() if beat.doing != PAUSED}
    behind = [rank for rank, progress in active.items() if progress == min(active.values())]
    named = sorted(silent) or (behind if 0 < len(behind) < len(beats) else [])
    shown = [beats[rank].describe(rank, silent=rank in silent) for rank in named or beats]
    return ("" if named else "no rank is behind: ") + _join_names(shown, "; ")


def _join_names(names: list[str], separator: str) -> str:
    more = [f"and {len(names) - 8} more"] if len(names) > 8 else []
    return separator.join(names[:8] + more)
