"""Ranks that fail, die, stall, cannot join or do different work: every rank ends, with one clear error."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fp8_suite.core.errors import EXIT_BAD_SETTING, EXIT_FAILED, EXIT_OUT_OF_MEMORY, UserError
from fp8_suite.data import order
from fp8_suite.data.order import BatchLayout
from fp8_suite.data.samples import Split
from fp8_suite.training import outcome, prepare, run
from fp8_suite.training.estimate import modes
from fp8_suite.training.parallel import watchdog
from fp8_suite.training.parallel.watchdog import CAUSE_OF_DEATH, RESUME_HINT, Watchdog
from fp8_suite.training.precision import recipes
from fp8_suite.training.tracking.tracker import Tracker
from fp8_suite.training.trainer import Trainer

from fp8_suite import train_fp8
from fp8_suite.train_multi_gpu import join_torchrun
from tests.children import forked, preload
from tests.training.parallel import jobs
from tests.training.parallel.jobs import HERE, Job, delay, last_checkpoint, refused, start, summary, train

preload(__name__)


# Ranks that fail, die or stall


def before_step(number: int, action: Callable[[], None], rank: int, *, whose: int = 1) -> None:
    """Make a rank call `action` before this step."""
    step = Trainer._before_step

    def changed(trainer, *args):
        if rank == whose and trainer.progress.step + 1 == number:
            action()
        return step(trainer, *args)

    Trainer._before_step = changed


def while_loading(number: int, action: Callable[[], None], rank: int) -> None:
    collate, calls = BatchLayout.collate, count(1)

    def changed(layout, step):
        if rank == 1 and next(calls) == number:
            action()
        return collate(layout, step)

    BatchLayout.collate = changed


def throw(error: Exception) -> None:
    raise error


def send_self(number: int) -> None:
    os.kill(os.getpid(), number)


halt, die = partial(send_self, signal.SIGSTOP), partial(send_self, signal.SIGKILL)
fail = partial(throw, KeyError("no such column"))
run_out_of_memory = partial(throw, torch.OutOfMemoryError("CUDA out of memory.\nmore of it"))
sleep = partial(time.sleep, 600)


def fail_with_slow_logs(rank: int) -> None:
    delay(Tracker, "finish", 600, message="finishing the logs")
    before_step(2, fail, rank, whose=0)


def halt_impatiently(rank: int) -> None:
    if rank == 0:  # the other one might take this one for dead on a loaded machine
        watchdog.SILENCE_SECONDS = 8.0
    before_step(3, halt, rank)


def library_error(rank: int) -> None:
    if rank == 1:
        prepare.build_loaders = lambda *args, **kwargs: json.loads("{")  # a ValueError


def slow_start_and_end(rank: int) -> None:
    if rank == 1:
        delay(prepare, "_load_data", 8)
    delay(Tracker, "finish", 8)
    delay(run, "generate_samples", 8)


def stall_at_start(method: str, whose: int, rank: int) -> None:
    prepare.DATA_SECONDS, watchdog.START_SECONDS = 8.0, 7.0
    if rank == whose:
        setattr(run if method == "assemble" else prepare, method, lambda *_, **__: sleep())


SAVES, HASTY = "--sharding_mode fsdp_full --save_interval 1", "--timeout_minutes 0.1"
PATCHES: dict[str, tuple[str, Callable[[int], None]]] = {
    "error": ("--sharding_mode ddp --save_interval 1", partial(before_step, 3, fail)),
    "out of memory": (SAVES, partial(before_step, 3, run_out_of_memory)),
    "library": ("", library_error),
    "killed": (f"{SAVES} --batch_size 1", partial(before_step, 3, die)),
    "slow logs": ("", fail_with_slow_logs),
    "stopped": (f"{SAVES} {HASTY}", partial(before_step, 3, halt)),
    "asleep": (f"{SAVES} {HASTY}", partial(while_loading, 3, sleep)),
    # The first rank writes and checks more files of a checkpoint than the others.
    "first asleep": (f"{SAVES} {HASTY}", partial(before_step, 4, sleep, whose=0)),
    "silent": ("--save_interval 1", halt_impatiently),
    "data": (HASTY, partial(stall_at_start, "_load_data", 1)),
    "checkpoint": (HASTY, partial(stall_at_start, "_find_checkpoint", 0)),
    "model": (HASTY, partial(stall_at_start, "assemble", 1)),
    "patient": (f"--max_steps 1 --generate_samples 1 {HASTY}", slow_start_and_end),
}


@pytest.fixture(scope="module")
def faulty(small, tmp_path_factory) -> dict[str, Job]:
    """Jobs with one fault each. They mostly wait, so they are all started at once."""
    folder, model = tmp_path_factory.mktemp("faulty"), small(num_hidden_layers=2)
    return {
        name: start(
            folder / name.replace(" ", "_"),
            f"{model} {flags}",
            patch=patch,
            ranks=3 if name == "killed" else 2,
        )
        for name, (flags, patch) in PATCHES.items()
    }


@pytest.mark.parametrize(
    ("name", "message", "code"),
    [
        ("error", "KeyError: 'no such column'", EXIT_FAILED),
        ("out of memory", "CUDA out of memory. Try a smaller --batch_size", EXIT_OUT_OF_MEMORY),
    ],
)
def test_an_error_of_one_rank_ends_the_job_and_is_printed_once(name, message, code, faulty):
    job = faulty[name]
    codes = job.wait()
    assert codes[1] == code and codes[0] in (code, EXIT_FAILED)
    (error,) = job.errors()
    assert error.startswith(f"error: rank 1 ({HERE}): {message}")
    assert ("Traceback" in job.printed()) == (name == "error")
    assert last_checkpoint(job.folder) == "step_000002"


def test_a_library_s_error_has_the_traceback_of_its_rank(faulty):
    """This holds for whichever rank prints it."""
    job = faulty["library"]
    assert job.wait() == [EXIT_FAILED] * 2
    (error,) = job.errors()
    assert error.startswith(f"error: rank 1 ({HERE}): JSONDecodeError: ")
    assert job.printed().count("Traceback") == 1 and "raw_decode" in job.printed()


def test_an_error_is_printed_before_the_logs_are_finished_and_ends_the_job_soon(faulty):
    job = faulty["slow logs"]
    assert job.wait() == [EXIT_FAILED] * 2
    before, _, _ = (job.output / "rank0").read_text().partition("finishing the logs")
    assert "error: rank 0" in before and "KeyError: 'no such column'" in before


def test_a_rank_that_is_killed_ends_the_job_and_is_named_once(faulty):
    job = faulty["killed"]
    assert job.wait() == [EXIT_FAILED, -signal.SIGKILL, EXIT_FAILED]
    assert job.errors() == [f"error: lost rank 1 ({HERE}): {CAUSE_OF_DEATH}. {RESUME_HINT}"]
    assert last_checkpoint(job.folder) in UNSURE


# A rank that was killed or stopped before step 3 may not have written its part of step 2.
UNSURE = ("step_000001", "step_000002")
STALLED = {
    "stopped": (6, 1, "stopped sending heartbeats while"),
    "asleep": (6, 1, "has been loading the data of step 3 for"),
    "first asleep": (6, 0, "has been loading the data of step 4 for"),
    "data": (8, 1, "has been loading the data for"),
    "checkpoint": (7, 0, "has been looking for a checkpoint for"),
    "model": (7, 1, "has been building the model for"),
}


@pytest.mark.parametrize("name", STALLED)
def test_a_rank_that_stalls_ends_the_job_and_is_named(name, faulty):
    job, (limit, whose, message) = faulty[name], STALLED[name]
    job.ranks[1 - whose].join(jobs.LIMIT)
    assert job.ranks[1 - whose].exitcode == EXIT_FAILED
    (error,) = job.errors()
    stalled = f"no progress for {limit} s; rank {whose} ({HERE}) {message}"
    assert error.startswith(f"error: --timeout_minutes 0.1: {stalled}") and f"rank {1 - whose} (" not in error
    if "save_interval" in PATCHES[name][0]:
        expected = UNSURE if name == "stopped" else (f"step_{2 if whose else 3:06d}",)
        assert last_checkpoint(job.folder) in expected


def test_a_silent_rank_ends_the_job_long_before_the_timeout(faulty):
    job = faulty["silent"]
    job.ranks[0].join(jobs.LIMIT)
    assert job.ranks[0].exitcode == EXIT_FAILED
    (error,) = job.errors()
    assert error.startswith(f"error: rank 1 ({HERE}) stopped sending heartbeats while ")
    assert CAUSE_OF_DEATH in error


def test_before_the_first_step_and_after_the_last_a_rank_may_take_longer_than_the_timeout(faulty):
    """Samples are generated after the other ranks have exited."""
    job = faulty["patient"]
    assert job.wait() == [0, 0], job.printed()
    assert "ANSWER" in (job.folder / "samples.txt").read_text()


def slow_and_impatient(rank: int) -> None:
    """Slow steps, a short limit for silence, and a store that drops every other heartbeat of rank 1."""
    watchdog.SILENCE_SECONDS = 3.0
    delay(Trainer, "_before_step", 0.1)
    send, count = Watchdog._send, iter(range(10**6))

    def stutter(dog):
        if rank == 1 and next(count) % 2:
            raise dist.DistStoreError("a timeout")
        send(dog)

    Watchdog._send = stutter


def test_a_job_that_is_suspended_or_has_a_slow_store_continues(tmp_path):
    """By the clock, the other rank was silent and this one made no progress while both were suspended."""
    flags = "--max_steps 12 --timeout_minutes 0.05 --no_export"
    job = start(tmp_path / "run", flags, patch=slow_and_impatient)
    job.wait_for_step(3)
    for number, seconds in ((signal.SIGSTOP, 5.0), (signal.SIGCONT, 0.0)):
        for process in job.ranks:
            os.kill(process.pid, number)
        time.sleep(seconds)
    assert job.wait() == [0, 0], job.printed()


# Ranks that do not fit together


def choose_differently(rank: int) -> None:
    """As on GPUs of different sizes."""
    modes.choose_mode = lambda *_, **__: (("ddp", "fsdp_full")[rank], "so")


def test_the_first_rank_chooses_the_mode_for_all_and_warns_of_data_alone(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows(40)))
    flags = f"--dataset_name {tmp_path / 'rows.jsonl'} --max_steps 1"
    job = train(tmp_path / "run", flags, patch=choose_differently)
    assert summary(job.folder)["sharding_mode"] == "ddp"
    assert job.printed().count("no such split in") == 1


def other_seed(rank: int) -> None:
    if rank == 1:
        parse = run.parse_config
        run.parse_config = lambda argv, **kwargs: parse([*argv, "--seed", "7"], **kwargs)


def other_software(rank: int) -> None:
    if rank == 1:
        versions = prepare.software() | {"torch": "1.0"}
        prepare.software = lambda: versions


def other_recipe(rank: int) -> None:
    """As if one node's GPUs or libraries could not run what the others can."""
    if rank == 1:
        original = recipes.resolve_precision
        recipes.resolve_precision = lambda cfg: replace(original(cfg), effective="bf16")


def fewer_samples_to_evaluate(rank: int) -> None:
    """Some ranks would wait in a collective of the evaluation after the others have finished it."""
    if rank == 1:
        sample = Split.sample
        Split.sample = lambda split, count: sample(split, count - 12)


EVALUATED = "--dataset_name demo --eval_split test --eval_samples 16 --no_packing --eval_batch_size 1"


@pytest.mark.parametrize(
    ("patch", "flags", "message"),
    [
        (other_seed, "", r"the settings differ on rank 1 \(.*\): seed 7 \(rank 0: 42\)"),
        (other_software, "", r"the software differ on rank 1 \(.*\): torch 1.0 \(rank 0: "),
        (other_recipe, "", r"the effective precision differ on rank 1 \(.*\): recipe bf16 \(rank 0: "),
        (fewer_samples_to_evaluate, EVALUATED, r"the data differ on rank 1 \(.*\): evaluation "),
    ],
)
def test_ranks_that_would_do_different_work_are_refused(patch, flags, message, tmp_path):
    assert re.search(message, refused(start(tmp_path / "run", flags, patch=patch)))
    assert not (tmp_path / "run").exists()


def in_own_folder(folder: Path, rank: int) -> None:
    order.WINDOW = 20
    os.chdir(folder / str(rank))


def rows(number: int) -> list[str]:
    return [f"{i} is the number after {i - 1}. " * 5 for i in range(number)]


DIFFERENT_FILES = {
    "data": ("--dataset_name rows.jsonl --split_name train", r"the data differ on rank 1 \(.*\): samples "),
    "folder": ("--output_dir here", r"--output_dir here"),
    "deepspeed": (
        "--sharding_mode deepspeed --deepspeed_config mine.json",
        r"the settings of --deepspeed_config mine.json differ on rank 1 \(.*\): zero_opt",
    ),
    # Its rows only differ after those that the start compares.
    "stream": (
        "--dataset_name late.jsonl --split_name train --streaming --eval_samples 0 --max_steps 40",
        r"positions in the stream differ on rank 1 \(.*\): row and sequence \[",
    ),
}


@pytest.mark.parametrize("kind", DIFFERENT_FILES)
def test_files_of_one_name_that_differ_between_nodes_are_refused(kind, tmp_path):
    for rank in range(2):
        (tmp_path / str(rank) / "here").mkdir(parents=True)
        texts = {
            "rows": rows(40 + rank),
            "late": rows(30) + [f"{i} " * 100 * rank + "end" for i in range(40)],
        }
        for name, lines in texts.items():
            lines = "".join(json.dumps({"text": text}) + "\n" for text in lines)
            (tmp_path / str(rank) / f"{name}.jsonl").write_text(lines)
        zero = {"zero_optimization": {"stage": 1 + rank}}
        (tmp_path / str(rank) / "mine.json").write_text(json.dumps(zero))
    flags, message = DIFFERENT_FILES[kind]
    error = refused(start(tmp_path / "run", flags, patch=partial(in_own_folder, tmp_path)))
    assert re.search(message, error), error


def test_more_ranks_than_sequences_are_refused_and_one_rank_warns(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "one row"}\n')
    job = start(tmp_path / "run", f"--dataset_name {tmp_path / 'rows.jsonl'} --batch_size 4", ranks=3)
    error = refused(job)
    assert "--batch_size 4: on 3 ranks a micro-batch needs 12 sequences, but --split_name train_1M" in error
    assert job.printed().count("using its only split") == 1


# Before the ranks meet


def too_few_gpus(rank: int) -> None:
    if rank == 1:
        os.environ["LOCAL_RANK"] = "0"  # the first of another node
        torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 1)


def test_a_rank_that_cannot_join_ends_the_others_at_once(tmp_path):
    """They do not wait for --timeout_minutes."""
    job = start(tmp_path / "fewer", patch=too_few_gpus)
    assert job.wait() == [EXIT_BAD_SETTING] * 2
    here = f"--nproc_per_node 2: {HERE} has 1 GPUs; start one rank per GPU"
    assert job.errors() == [f"error: rank 1 ({HERE}): {here}", f"error: {here}"]


@pytest.mark.parametrize(
    ("begin", "variable"), [(train_fp8.one_device, "WORLD_SIZE"), (join_torchrun, "SLURM_STEP_NUM_TASKS")]
)
def test_several_processes_without_a_job_are_refused(begin, variable, monkeypatch):
    """Each would train the same run once more."""
    monkeypatch.setenv(variable, "2")
    with pytest.raises(UserError, match=f"^{variable}=2: .*torchrun") as refusal:
        begin(None)
    assert refusal.value.exit_code == EXIT_BAD_SETTING


# The end of a process


class Held:
    def __del__(self):
        print("torn down")


def end_with_handlers(output: Path) -> None:
    jobs.redirect(output)
    sys.modules["held"] = Held()
    outcome.atexit.register(print, "exit handler")
    sys.stdout.write("not flushed, ")
    outcome.exit_process(75)


def test_a_rank_ends_with_its_exit_handlers_but_without_tearing_python_down(tmp_path):
    """Threads that outlive their process group abort a process that is torn down."""
    with forked(end_with_handlers, tmp_path / "output") as child:
        child.join(jobs.LIMIT)
        assert child.exitcode == 75
    assert (tmp_path / "output").read_text() == "not flushed, exit handler\n"
