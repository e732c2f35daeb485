"""Wall time by kind, over launches that were killed."""

import time
from dataclasses import asdict

import pytest
from fp8_suite.training.checkpoint.progress import Progress, WallTime


def launch(folder, meta=None) -> WallTime:
    """Start a launch that resumes from a checkpoint's metadata, if any, on two GPUs."""
    progress = Progress.from_meta(meta) if meta else Progress()
    wall_time = WallTime(folder, progress, time.perf_counter(), gpus=2, nodes=1)
    wall_time.restore()
    return wall_time


def kinds(progress) -> dict[str, float]:
    assert sum(progress.seconds_by_kind.values()) == progress.wall_seconds == progress.gpu_seconds / 2
    return {kind: seconds for kind, seconds in progress.seconds_by_kind.items() if seconds}


def take_step(wall_time, advance, *, seconds=4.0):
    with wall_time.phase("data"):
        advance(1.0)
    with wall_time.phase("steps"):
        advance(seconds / 2)
        with wall_time.phase("saving"):  # as an update that waits for an asynchronous save
            advance(0.5)
        advance(seconds / 2)
    advance(0.25)


def test_the_innermost_phase_has_the_time_also_after_an_error(tmp_path, advance):
    wall_time = launch(tmp_path)
    advance(10.0)
    with wall_time.phase("evaluation"):
        advance(2.0)
    wall_time.end_start()
    with pytest.raises(KeyError), wall_time.phase("saving"), wall_time.phase("steps"):
        advance(3.0)
        raise KeyError
    take_step(wall_time, advance)
    wall_time.count()
    expected = {"start": 10.0, "evaluation": 2.0, "steps": 7.0, "data": 1.0, "saving": 0.5, "other": 0.25}
    assert kinds(wall_time.progress) == expected
    assert wall_time.rates(83)["perf/tokens_per_wall_second"] == 83 / 20.75
    assert wall_time.progress.describe_wall_time().startswith("goodput 33.7% of 0:00:21 (start 48.2%, ")


def test_steps_after_the_checkpoint_are_lost_by_each_of_two_kills(tmp_path, advance):
    """A step is kept; one after the checkpoint is lost, and after the resume two more."""
    first = launch(tmp_path)
    first.end_start()
    take_step(first, advance)
    meta = {"progress": asdict(first.progress)}
    for steps in (1, 2):
        killed = launch(tmp_path, meta) if steps == 2 else first
        killed.end_start()
        for _ in range(steps):
            take_step(killed, advance)
        killed.count()
    resumed = launch(tmp_path, meta).progress
    assert kinds(resumed) == {"steps": 4.0, "data": 1.0, "lost": 15.0, "saving": 2.0, "other": 1.0}
    assert resumed.goodput == 4.0 / 23.0
