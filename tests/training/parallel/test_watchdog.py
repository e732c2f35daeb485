"""Watchdog: which rank it names when a job stalls. Ranks: how they join, also after a restart."""

import subprocess
import sys
import threading
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist
from fp8_suite.core.errors import UserError
from fp8_suite.training.parallel import ranks
from fp8_suite.training.parallel import watchdog as watchdog_module
from fp8_suite.training.parallel.watchdog import PAUSED, Heartbeat, Watchdog, name_stragglers

from tests.children import running


def test_the_rank_that_is_late_or_missing_is_named():
    common = {"progress": 20, "host": "node", "seconds": 60.0, "number": 30}
    beats = {n: Heartbeat(doing="exporting" if n == 2 else PAUSED, **common) for n in range(4)}
    assert name_stragglers(beats, set(), 4) == "rank 2 (node) has been exporting for 60 s"
    missing = "rank 0 has not started; rank 3 has not started"
    assert name_stragglers({n: beats[n] for n in (1, 2)}, {1}, 4) == missing


@pytest.fixture
def one(monkeypatch):
    """A watchdog of one rank with a store and no thread."""
    watchdog = Watchdog(0.1)
    watchdog._store = dist.HashStore()
    monkeypatch.setattr(watchdog._closed, "wait", lambda interval: watchdog._closed.is_set())
    watchdog.beat("computing step 1")
    watchdog._send()
    return watchdog


def test_a_rank_that_progresses_while_it_compares_the_others_is_not_stalled(one, monkeypatch):
    one._clock += 7.0
    assert "no rank is behind: rank 0" in one._stalled()
    monkeypatch.setattr(one._closed, "wait", lambda interval: one.beat("computing step 2"))
    assert one._stalled() is None


def test_a_rank_whose_save_ends_after_an_error_exits_although_the_store_is_gone(one, monkeypatch):
    """Rank 0, which has the store, may exit first."""
    looks = iter([True, False])

    def saving() -> bool:
        monkeypatch.setattr(one, "_send", lambda: pytest.fail("the store is gone"))
        return next(looks)

    one.saving = saving
    one.fail()
    monkeypatch.setattr(one, "_exit", sys.exit)
    with pytest.raises(SystemExit):
        one._watch()


SERVER = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


def test_a_job_that_stalls_ends_even_if_the_store_is_gone(monkeypatch, capsys):
    """The store's host is killed: heartbeats cannot be compared, and a rank that fails must not hang."""
    monkeypatch.setattr(watchdog_module, "SILENCE_SECONDS", 1.0)
    with running([sys.executable, "-c", SERVER], stdout=subprocess.PIPE) as server:
        watchdog = Watchdog(0.05)  # of a world of one, so without a thread
        watchdog._store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False)
        watchdog._store.set_timeout(timedelta(seconds=2))
        monkeypatch.setattr(watchdog, "_exit", watchdog._closed.set)
        watchdog.beat("computing step 1")
        server.kill()
        server.wait()
        thread = threading.Thread(target=watchdog._watch, daemon=True)
        thread.start()
        thread.join(300)
        assert not thread.is_alive()
        assert "--timeout_minutes 0.05: no progress for 3 s on rank 0" in capsys.readouterr().err
        assert watchdog.fail(), "no other rank can print its error"


def start_together(store: dist.Store, order: list[int]) -> set[str]:
    """Return the names that ranks agree on when they join in this order."""
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
    """torchrun keeps its store over restarts; ranks of a new start must not use the old name."""
    store = dist.HashStore()
    starts = [start_together(store, order) for order in ([0, 1, 2], [1, 2, 0], [2, 0, 1])]
    assert [len(names) for names in starts] == [1, 1, 1] and len(set.union(*starts)) == 3
    with pytest.raises(UserError, match=r"^rank 1 \(.*\) gets no reply from rank 0"):
        ranks.agree_on_start(store, 1, 3, timedelta(seconds=0.3))


def test_ranks_that_do_not_come_are_named():
    with pytest.raises(UserError, match=r"^ranks 1, 2 of 3 did not join within 0:00:00.1"):
        ranks.agree_on_start(dist.HashStore(), 0, 3, timedelta(seconds=0.1))


def test_ranks_with_and_without_a_gpu_do_not_start_together():
    """NCCL would wait forever for the ranks without a GPU."""
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
