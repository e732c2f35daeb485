"""Saves of the training loop: what the next update, the next save, the watchdog and the user see of them."""

import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from fp8_suite.core.errors import UserError
from fp8_suite.training.checkpoint import saver, staging, store
from fp8_suite.training.checkpoint.saver import CheckpointSaver, choose_stager
from fp8_suite.training.checkpoint.settings import CheckpointConfig
from fp8_suite.training.checkpoint.staging import Stager
from fp8_suite.training.checkpoint.store import Checkpoints

CPU = torch.device("cpu")
FILES = 3  # of a save


@pytest.fixture
def slow_disk(monkeypatch) -> None:
    write = store.write_tensors
    monkeypatch.setattr(store, "write_tensors", lambda *args: time.sleep(0.3) or write(*args))
    monkeypatch.setattr(staging, "SMALL", 4)
    monkeypatch.setattr(Checkpoints, "file_bytes", 40)


@pytest.fixture
def built(tmp_path, monkeypatch):
    """Return a function that builds a saver of a state of `FILES` tensors, and the list of what it tells."""
    state = {f"tensor {number}": torch.full((10,), float(number)) for number in range(FILES)}
    monkeypatch.setattr(saver, "saved_state", lambda run, scaling: (state, {}))
    wall_time = SimpleNamespace(count=lambda: None, move=lambda *_: None, phase=saver.suppress)
    told: list[str] = []

    def build(*, copies_host: bool = True) -> tuple[CheckpointSaver, list[str]]:
        built = CheckpointSaver(
            Checkpoints(tmp_path, keep_last=9),
            SimpleNamespace(),
            SimpleNamespace(state=dict),
            wall_time,
            stager=Stager(CPU, copies_host=copies_host),
            saved_step=-1,
            restored_unevaluated=False,
            heartbeat=partial(told.append, "beat"),
        )
        return built, told

    return build


@pytest.mark.parametrize(
    ("interval", "done", "total", "in_background"),
    [
        ("500", 0, 1000, True),
        ("500", 0, 500, False),
        ("500", 400, 600, True),
        ("500", 500, 900, False),
        ("30m", 0, 9, True),
        ("0", 0, 9, False),
    ],
)
def test_saves_are_in_the_background_if_one_is_due_before_the_end(interval, done, total, in_background):
    setup = SimpleNamespace(cfg=SimpleNamespace(checkpoint=CheckpointConfig(save_interval=interval)))
    stager = choose_stager(setup, SimpleNamespace(owns_masters=True), done, total)
    assert (stager is not None) == in_background


@pytest.mark.parametrize(("gathered", "copies_host"), [([12, 12], True), ([12, 7], False), ([7, 3], None)])
def test_the_node_with_the_least_memory_decides_what_is_copied(gathered, copies_host, monkeypatch, capsys):
    """Copies of the state take 10 bytes, and 5 without that in host memory."""
    setup = SimpleNamespace(cfg=SimpleNamespace(checkpoint=CheckpointConfig(save_interval="1")))
    rooms = [[choice for choice, size in ((True, 10), (False, 5)) if size <= free] for free in gathered]
    monkeypatch.setattr(saver.ranks, "gather", lambda choices: rooms if choices == rooms[0] else None)
    monkeypatch.setattr(saver, "host_capacity", lambda setup: gathered[0] + 1)
    monkeypatch.setattr(saver, "offloaded_bytes", lambda setup: 1)
    monkeypatch.setattr(saver, "staging_bytes", lambda setup, copies_host: 10 if copies_host else 5)
    stager = choose_stager(setup, SimpleNamespace(owns_masters=False, device=CPU), 0, 9)
    assert (stager and stager.copies_host) is copies_host
    assert ("WARNING" in capsys.readouterr().out) == (stager is None)


@pytest.mark.usefixtures("slow_disk")
def test_a_save_waits_for_the_one_before(built):
    run, _ = built()
    for step in (1, 2):
        run.save(step)
        run.before_update()
    assert run.checkpoints.latest().name == "step_000001"
    run.finish()
    assert run.checkpoints.latest().name == "step_000002"


@pytest.mark.usefixtures("slow_disk")
def test_the_watchdog_hears_of_every_file_while_the_update_waits_for_offloaded_state(built):
    run, told = built(copies_host=False)
    run.save(1)
    run.before_update()
    assert told == ["beat"] * FILES
    run.finish()


def test_memory_that_is_lacking_for_saves_is_an_error_long_before_the_first_one(built, monkeypatch):
    def refuse(size, for_gpu):
        raise UserError("use --no_async_save")

    monkeypatch.setattr(staging, "_allocate", refuse)
    run, _ = built()
    run.reserve()
    with pytest.raises(UserError, match="--no_async_save"):
        for _ in range(500):
            run.check()
            time.sleep(0.01)


def test_the_watchdog_may_look_when_a_save_is_just_ending(built, monkeypatch):
    """The main thread takes the pending save away between two looks of the watchdog's thread."""
    looks = iter([SimpleNamespace(done=lambda: True), None])
    run, _ = built()
    monkeypatch.setattr(CheckpointSaver, "pending", property(lambda self: next(looks)), raising=False)
    assert not run.saving()
