"""The rank that is named when a job stalls, and how ranks find each other again after a restart."""

import json
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from core.errors import UserError
from tests.children import running
from training.parallel import ranks
from training.parallel import watchdog as watchdog_module
from training.parallel.watchdog import AFTERWARDS, PAUSED, Heartbeat, Watchdog, name_stragglers


def stragglers(silent: tuple[int, ...] = (), **changes: dict) -> str:
    """Name them among four ranks on two nodes, computing step 7 for 60 s, except for `rank1=...`."""
    beats = {}
    for rank in range(4):
        values = {"progress": 20, "doing": "computing step 7", "seconds": 60.0, "number": 30}
        beats[rank] = Heartbeat(host=f"node{rank // 2}", **values | changes.get(f"rank{rank}", {}))
    return name_stragglers(beats, set(silent), 4)


LOADING = {"progress": 19, "doing": "loading the data of step 7", "seconds": 61.0}
FINISHED = {f"rank{rank}": {"doing": PAUSED, "seconds": 0.0} for rank in (0, 1, 3)}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rank2": LOADING}, "rank 2 (node1) loading the data of step 7 for 61 s"),
        ({"silent": (3,), "rank0": LOADING}, "rank 3 (node1) is silent, last computing step 7"),
        (FINISHED | {"rank2": {"doing": "exporting"}}, "rank 2 (node1) exporting for 60 s"),
    ],
    ids=["behind", "silent before one that is behind", "late, though others have finished"],
)
def test_the_straggler_is_named(changes, named):
    assert stragglers(**changes) == named


def test_ranks_in_the_same_place_are_all_named():
    start = "all ranks are in the same place: rank 0 (node0) computing step 7 for 60 s; rank 1"
    assert stragglers().startswith(start) and "rank 3 (node1)" in stragglers()


def test_ranks_without_a_heartbeat_are_named_before_all_others():
    beats = {1: Heartbeat(20, "computing step 7", "node0", 60.0, 30)}
    assert name_stragglers(beats, {1}, 3) == "rank 0 has not begun; rank 2 has not begun"


def test_at_most_eight_ranks_are_named():
    text = name_stragglers(
        {rank: Heartbeat(1, "exporting", "node", 90.0, 30) for rank in range(12)}, set(), 12
    )
    assert "rank 7 (node)" in text and "rank 8 (node)" not in text and "and 4 more" in text


def test_without_other_ranks_the_watchdog_is_inactive():
    watchdog = Watchdog(0.001)
    watchdog.beat("computing step 1")
    assert watchdog.fail("an error of the only rank"), "it has to print it"
    watchdog.pause()
    watchdog.close()


@pytest.fixture
def one(monkeypatch):
    """A watchdog of one rank with a store, no thread, and a clock that `later` puts forward."""
    watchdog, now = Watchdog(0.1), [time.monotonic()]
    watchdog._store, watchdog._lock = dist.HashStore(), threading.Lock()
    watchdog._send()
    monkeypatch.setattr(watchdog_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watchdog._closed, "wait", lambda interval: watchdog._closed.is_set())
    watchdog.beat("computing step 1")

    def later(seconds):
        now[0] += seconds

    return watchdog, later


def test_a_rank_that_progresses_while_it_compares_the_others_is_not_stalled(one, monkeypatch):
    watchdog, later = one
    later(7.0)
    assert watchdog._stalled() == (
        "--timeout_minutes 0.1: no progress for 6 s; all ranks are in the same place: rank 0 "
        f"({ranks.platform.node()}) computing step 1 for 7 s. {AFTERWARDS}"
    )
    monkeypatch.setattr(watchdog._closed, "wait", lambda interval: watchdog.beat("computing step 2"))
    assert watchdog._stalled() is None


def test_ranks_that_fell_silent_are_named_when_a_collective_fails(one, monkeypatch):
    """Nobody is named if all ranks send heartbeats, or if one has reported its error."""
    watchdog, _ = one
    monkeypatch.setattr(watchdog_module.ranks, "world_size", lambda: 4)
    count = iter(range(1000))

    def send(*numbers: int) -> None:
        for rank in numbers:
            beat = Heartbeat(3, "computing step 1", f"node{rank // 2}", 1.0, next(count))
            watchdog._store.set(f"watchdog/{rank}", json.dumps(vars(beat)))

    send(1, 2, 3)
    monkeypatch.setattr(watchdog._closed, "wait", lambda interval: send(1))
    how = "are gone: they were killed, or their node is lost"
    assert watchdog.gone() == f"rank 2 (node1), rank 3 (node1) {how}. {AFTERWARDS}"
    monkeypatch.setattr(watchdog._closed, "wait", lambda interval: send(1, 2, 3))
    assert watchdog.gone() is None
    monkeypatch.setattr(watchdog._closed, "wait", lambda interval: None)
    assert how in watchdog.gone()
    assert watchdog.fail("an error of another rank") and watchdog.gone() is None


def test_a_phase_of_the_start_has_its_own_limit_and_the_next_step_the_timeout(one):
    watchdog, later = one
    watchdog.starting("building the model")
    later(watchdog_module.START_SECONDS - 1)
    assert watchdog._stalled() is None
    later(2)
    assert "--timeout_minutes 0.1: no progress for 7200 s; all ranks" in watchdog._stalled()
    watchdog.beat("computing step 1")
    later(7)
    assert "no progress for 6 s" in watchdog._stalled()
    watchdog.pause()
    later(1000)
    assert watchdog._stalled() is None


@pytest.mark.parametrize(("seconds", "ends"), [(0.0, True), (3.0, True), (100.0, False)])
def test_time_in_which_the_process_was_suspended_ends_no_job(one, monkeypatch, seconds, ends):
    """It could not receive heartbeats, and the other ranks may have been suspended too."""
    watchdog, later = one
    failed, seen = [], iter(["rank 1 is silent", None])

    def look():
        later(seconds)
        if (message := next(seen)) is None:
            watchdog._closed.set()
        return message

    monkeypatch.setattr(watchdog, "_dead", look)
    monkeypatch.setattr(watchdog, "_stalled", lambda: None)
    monkeypatch.setattr(watchdog, "fail", failed.append)
    monkeypatch.setattr(watchdog, "_exit", watchdog._closed.set)
    began = watchdog._since
    watchdog._watch()
    assert bool(failed) == ends and (watchdog._since > began + 90) == (not ends)


SERVER = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


def test_a_job_that_stalls_ends_even_if_the_store_is_gone(monkeypatch, capsys):
    """Its host is killed: no rank can compare heartbeats, and a failing one must not hang either."""
    monkeypatch.setattr(watchdog_module, "SILENCE_SECONDS", 1.0)
    with running([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False)
        store.set_timeout(timedelta(seconds=2))
        watchdog = Watchdog(0.1)  # of a world of one, so without a thread
        watchdog._store, watchdog._lock = store, threading.Lock()
        monkeypatch.setattr(watchdog, "_exit", watchdog._closed.set)
        watchdog.beat("computing step 1")
        server.kill()
        server.wait()
        thread = threading.Thread(target=watchdog._watch, daemon=True)
        thread.start()
        thread.join(300)
        assert not thread.is_alive()
        assert "--timeout_minutes 0.1: no progress for 6 s on rank 0" in capsys.readouterr().err
        assert watchdog.fail("an error"), "no other rank can print it"


def start_together(store: dist.Store, order: list[int]) -> set[str]:
    """Return the names that ranks agree on when they come in this order."""
    names = {}

    def join(number: int) -> None:
        names[number] = ranks.agree_on_start(store, number, len(order), timedelta(seconds=300))

    threads = [threading.Thread(target=join, args=(number,), daemon=True) for number in order]
    for thread in threads:
        thread.start()
        thread.join(0.1)
    for thread in threads:
        thread.join(300)
    assert names.keys() == set(order)
    return set(names.values())


def test_each_start_of_the_ranks_has_its_own_name():
    """The launcher keeps its store over restarts; ranks of a new start must not use the old name."""
    store = dist.HashStore()
    starts = [start_together(store, order) for order in ([0, 1, 2], [1, 2, 0], [2, 0, 1])]
    assert [len(names) for names in starts] == [1, 1, 1] and len(set.union(*starts)) == 3
    with pytest.raises(UserError, match="rank 0 does not answer rank 1"):
        ranks.agree_on_start(store, 1, 3, timedelta(seconds=0.3))


def test_ranks_that_do_not_come_are_named():
    with pytest.raises(TimeoutError, match=r"^ranks 1, 2 of 3$"):
        ranks.agree_on_start(dist.HashStore(), 0, 3, timedelta(seconds=0.1))


def test_ranks_with_and_without_a_gpu_do_not_start_together():
    """NCCL would wait forever for those without."""
    store = dist.HashStore()
    store.set("start", "an earlier start's")

    def join_without_gpu() -> None:
        with suppress(UserError):  # rank 0 does not accept it
            ranks.agree_on_start(store, 1, 2, timedelta(seconds=2), device_type="cpu")

    late = threading.Thread(target=join_without_gpu, daemon=True)
    late.start()
    with pytest.raises(UserError, match=r"^ranks 1 \(.+\) see no GPU, the others do: check nvidia-smi"):
        ranks.agree_on_start(store, 0, 2, timedelta(seconds=300), device_type="cuda")
    late.join(300)
    ranks._refuse_mixed_devices(["a cpu here", "b cpu there"])


@pytest.mark.parametrize(
    ("here", "there"), [({}, {"weights": 1}), ({"weights": 1}, {}), ({"a": 1}, {"a": 2})]
)
def test_values_that_differ_or_that_one_rank_lacks_are_refused(here, there, monkeypatch):
    monkeypatch.setattr(ranks, "gather", lambda value: [("node0", here), ("node1", there)])
    with pytest.raises(UserError, match=r"^the files differ on rank 1 \(node1\): (weights|a) "):
        ranks.agree("the files", here)
