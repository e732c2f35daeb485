"""Who is named when a job stalls, and how ranks find each other again after a restart."""

import json
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from training.parallel import ranks
from training.parallel import watchdog as watchdog_module
from training.parallel.watchdog import Place, Watchdog, stalled


def places(**changes: dict) -> dict[int, Place]:
    """Four ranks on two nodes, computing step 7 for 60 s, but for `rank1=...`."""
    found = {}
    for rank in range(4):
        values = {"beats": 20, "doing": "computing step 7", "seconds": 60.0, "told": 30}
        found[rank] = Place(host=f"node{rank // 2}", **values | changes.get(f"rank{rank}", {}))
    return found


def message(silent: tuple[int, ...] = (), **changes: dict) -> str:
    return stalled(places(**changes), set(silent), 4, timeout=60.0, limit=60.0)


def test_a_rank_behind_the_others_is_named():
    text = message(rank2={"beats": 19, "doing": "loading the data of step 7", "seconds": 61.0})
    assert text == (
        "--timeout_minutes 1: no progress for 60 s; rank 2 (node1) loading the data of step 7 for 61 s. What "
        "was saved before is intact; the same command with this run's --output_dir goes on from it"
    )


def test_a_silent_rank_is_named_before_one_that_is_behind():
    text = message(silent=(3,), rank0={"beats": 19})
    assert "rank 3 (node1) is not heard of any more, last computing step 7" in text
    assert "rank 0" not in text


def test_ranks_in_the_same_place_are_all_named():
    text = message()
    assert "all ranks are in the same place: rank 0 (node0) computing step 7 for 60 s; rank 1" in text
    assert "rank 3 (node1)" in text


def test_a_rank_that_is_late_is_named_beside_ranks_that_have_finished():
    """They made as many beats, and rest."""
    done = {f"rank{rank}": {"doing": watchdog_module.RESTING, "seconds": 0.0} for rank in (0, 1, 3)}
    text = message(**done, rank2={"doing": "exporting"})
    assert "no progress for 60 s; rank 2 (node1) exporting for 60 s." in text and "rank 0" not in text


def test_a_rank_that_has_said_nothing_yet_is_named_before_all_others():
    text = stalled({1: places()[1]}, {1}, 3, timeout=60.0, limit=60.0)
    assert "no progress for 60 s; rank 0 has not begun; rank 2 has not begun. What" in text


def test_of_many_ranks_eight_are_named():
    many = {rank: Place(1, "exporting", "node", 90.0, 30) for rank in range(12)}
    text = stalled(many, set(), 12, timeout=60.0, limit=60.0)
    assert "rank 7 (node)" in text and "rank 8 (node)" not in text and "and 4 more" in text


def test_without_other_ranks_the_watchdog_does_nothing():
    watchdog = Watchdog(0.001)
    watchdog.beat("computing step 1")
    assert watchdog.fail("an error of the only rank"), "whose message is to be printed"
    watchdog.rest()
    watchdog.close()


@pytest.fixture
def alone(monkeypatch):
    """A watchdog of one rank with a store, no thread, and a clock that `later` puts forward."""
    watchdog, now = Watchdog(0.1), [time.monotonic()]
    watchdog._store, watchdog._lock = dist.HashStore(), threading.Lock()
    watchdog._tell()
    monkeypatch.setattr(watchdog_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watchdog._ended, "wait", lambda pause: watchdog._ended.is_set())
    watchdog.beat("computing step 1")

    def later(seconds):
        now[0] += seconds

    return watchdog, later


def test_a_rank_that_goes_on_while_it_looks_who_is_behind_is_not_stalled(alone, monkeypatch):
    watchdog, later = alone
    later(7.0)
    assert "no progress for 6 s" in watchdog._stalled()
    monkeypatch.setattr(watchdog._ended, "wait", lambda pause: watchdog.beat("computing step 2"))
    assert watchdog._stalled() is None


def looked_at(watchdog: Watchdog, monkeypatch, *tells: int) -> None:
    """A world of four ranks, of which `tells` go on telling where they are."""
    monkeypatch.setattr(watchdog_module.ranks, "world_size", lambda: 4)
    told = iter(range(1000))

    def tell(pause: float = 0.0, numbers: tuple[int, ...] = tells) -> None:
        for rank in numbers:
            place = Place(3, "computing step 1", f"node{rank // 2}", 1.0, next(told))
            watchdog._store.set(f"watchdog/{rank}", json.dumps(vars(place)))

    tell(numbers=(1, 2, 3))
    monkeypatch.setattr(watchdog._ended, "wait", tell)


def test_ranks_that_fell_silent_are_named_when_a_collective_fails(alone, monkeypatch):
    watchdog, _ = alone
    looked_at(watchdog, monkeypatch, 1)
    assert watchdog.gone() == (
        "rank 2 (node1), rank 3 (node1) are gone: they were killed, or their node is lost. What was saved "
        "before is intact; the same command with this run's --output_dir goes on from it"
    )


def test_nobody_is_taken_for_gone_who_tells_or_where_a_rank_has_said_why(alone, monkeypatch):
    watchdog, _ = alone
    looked_at(watchdog, monkeypatch, 1, 2, 3)
    assert watchdog.gone() is None
    looked_at(watchdog, monkeypatch)
    assert "are gone" in watchdog.gone()
    assert watchdog.fail("an error of another rank") and watchdog.gone() is None


def test_a_part_of_the_start_has_a_limit_of_its_own_and_the_next_step_has_the_timeout(alone):
    watchdog, later = alone
    watchdog.starting("building the model")
    later(watchdog_module.START_SECONDS - 1)
    assert watchdog._stalled() is None
    later(2)
    assert "--timeout_minutes 0.1: no progress for 7200 s; all ranks are in the" in watchdog._stalled()
    watchdog.beat("computing step 1")
    later(7)
    assert "no progress for 6 s" in watchdog._stalled()


@pytest.mark.parametrize(("seconds", "ends"), [(0.0, True), (3.0, True), (100.0, False)])
def test_what_is_seen_after_a_pause_of_the_process_ends_no_job(alone, monkeypatch, seconds, ends):
    """It was suspended between two looks at the others: they could not tell anything either."""
    watchdog, later = alone
    failed, seen = [], iter(["rank 1 is not heard of any more", None])

    def look():
        later(seconds)
        if (said := next(seen)) is None:
            watchdog._ended.set()
        return said

    monkeypatch.setattr(watchdog, "_dead", look)
    monkeypatch.setattr(watchdog, "_stalled", lambda: None)
    monkeypatch.setattr(watchdog, "fail", failed.append)
    monkeypatch.setattr(watchdog, "_exit", watchdog._ended.set)
    began = watchdog._since
    watchdog._watch()
    assert bool(failed) == ends and (watchdog._since > began + 90) == (not ends)


SERVER = """
import sys, time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


def test_a_job_that_stalls_ends_even_if_the_store_is_gone(monkeypatch, capsys):
    """Its host is killed: no rank can ask who is behind, and the failing one must not hang either."""
    monkeypatch.setattr(watchdog_module, "SILENCE_SECONDS", 1.0)
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False)
    store.set_timeout(timedelta(seconds=2))
    watchdog = Watchdog(0.1)  # of a world of one, so without a thread
    watchdog._store, watchdog._lock = store, threading.Lock()
    monkeypatch.setattr(watchdog, "_exit", watchdog._ended.set)
    watchdog.beat("computing step 1")
    server.kill()
    server.wait()
    thread = threading.Thread(target=watchdog._watch, daemon=True)
    began = time.monotonic()
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and time.monotonic() - began > 5
    assert "--timeout_minutes 0.1: no progress for 6 s on rank 0" in capsys.readouterr().err
    began = time.monotonic()
    assert watchdog.fail("an error"), "nobody is left to tell"
    assert time.monotonic() - began < 20


def start_together(store: dist.Store, order: list[int]) -> set[str]:
    """The names that ranks agree on when they come in this order."""
    names = {}

    def join(number: int) -> None:
        names[number] = ranks.agree_on_start(store, number, len(order), timedelta(seconds=20))

    threads = [threading.Thread(target=join, args=(number,)) for number in order]
    for thread in threads:
        thread.start()
        thread.join(0.1)
    for thread in threads:
        thread.join(30)
    assert names.keys() == set(order)
    return set(names.values())


def test_each_start_of_the_ranks_has_a_name_of_its_own():
    """The launcher keeps its store over restarts; ranks of a new start must not take the old name."""
    store = dist.HashStore()
    starts = [start_together(store, order) for order in ([0, 1, 2], [1, 2, 0], [2, 0, 1])]
    assert [len(names) for names in starts] == [1, 1, 1] and len(set.union(*starts)) == 3


def test_a_start_without_its_first_rank_ends():
    store = dist.HashStore()
    start_together(store, [0, 1])
    with pytest.raises(RuntimeError, match="rank 0 does not answer rank 1"):
        ranks.agree_on_start(store, 1, 2, timedelta(seconds=0.3))


def test_ranks_with_and_without_a_gpu_do_not_start_together():
    """NCCL would wait for those that came without, for ever."""
    store = dist.HashStore()
    store.set("start", "an earlier start's")
    late = threading.Thread(target=answer, args=(store, 1, "cpu"))
    late.start()
    with pytest.raises(RuntimeError, match=r"^ranks 1 \(.+\) see no GPU, the others do: look at nvidia-smi"):
        ranks.agree_on_start(store, 0, 2, timedelta(seconds=20), device_type="cuda")
    late.join()
    ranks._refuse_mixed(["a cpu here", "b cpu there"])


def answer(store: dist.Store, number: int, device_type: str) -> None:
    with suppress(RuntimeError):  # rank 0 does not take it
        ranks.agree_on_start(store, number, 2, timedelta(seconds=2), device_type=device_type)


@pytest.mark.parametrize(
    ("here", "there"), [({}, {"weights": 1}), ({"weights": 1}, {}), ({"a": 1}, {"a": 2})]
)
def test_what_only_one_rank_has_differs_too(here, there, monkeypatch):
    monkeypatch.setattr(ranks, "gather", lambda value: [("node0", here), ("node1", there)])
    with pytest.raises(ValueError, match=r"^the files differ on rank 1 \(node1\): (weights|a) "):
        ranks.agree("the files", here)
