"""Runs that are killed in every part of a save in the background lose nothing, and resume bit by bit."""

import os
import signal
from functools import partial
from itertools import count

from fp8_suite.training.checkpoint import store
from fp8_suite.training.checkpoint.staging import Stager

from tests.children import preload
from tests.training.parallel import jobs
from tests.training.parallel.jobs import checkpoint, curve, same_bits, saved, start, train

preload(__name__)

PLACES = {  # where the second save of a launch dies, and the checkpoint that is then the last
    "staging": (Stager, "_wait", 2),
    "writing": (store, "write_tensors", 4),
    "publishing": (store, "publish", 6),
}
FLAGS = "--max_steps 8 --save_interval 2 --no_export --mixed_precision bf16 --sharding_mode fsdp_full"


def die_in(place: str, rank: int) -> None:
    owner, name, _ = PLACES[place]
    original, calls = getattr(owner, name), count(1)

    def dying(*args):
        if next(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    setattr(owner, name, dying)


def test_a_run_killed_in_every_part_of_a_save_equals_an_uninterrupted_one(small, tmp_path):
    folder, flags = tmp_path / "killed", f"{FLAGS} {small(num_hidden_layers=2)}"
    whole = train(tmp_path / "whole", f"{flags} --keep_last 4 --no_async_save").folder
    for place, (_, _, step) in PLACES.items():
        job = start(folder, flags, patch=partial(die_in, place))
        jobs.wait_until(lambda job=job: any(process.exitcode for process in job.ranks), job)
        for process in job.ranks:
            process.kill()
        assert -signal.SIGKILL in job.wait(), job.printed()
        assert jobs.last_checkpoint(folder) == f"step_{step:06d}", place
        assert same_bits(saved(folder, step), saved(whole, step)), place
        jobs.children.close()
    train(folder, flags)
    assert same_bits(saved(folder, 8), saved(whole, 8)) and curve(folder) == curve(whole)
    assert not list(checkpoint(folder, 8).parent.glob(".*")), "leftovers are deleted"
