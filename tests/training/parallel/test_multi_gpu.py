"""Whole runs on several ranks, over gloo on the CPU: the same run as on one device, resume, and faults."""

import contextlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers.models.llama.modeling_llama  # noqa: F401  (imported by every run)
from safetensors.torch import load_file, save_file
from torch.distributed import distributed_c10d as c10d

from core.errors import EXIT_BAD_SETTING, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OUT_OF_MEMORY, bad_setting
from core.packages import ROOT
from data import order
from data.order import Layout
from data.samples import Split
from te_models.hugging_face import HFCausalLM
from tests.children import forked, preload, running
from tests.hugging_face_models import save_mixture, save_model_with_images
from train_multi_gpu import join_torchrun
from training import outcome, prepare, resolve, run
from training.checkpoint.store import Checkpoints
from training.parallel import memory, watchdog
from training.parallel.ranks import PATIENCE, TORCHRUN
from training.parallel.watchdog import AFTERWARDS, Watchdog
from training.tracking.tracker import Tracker
from training.trainer import Trainer

preload(__name__)

HERE = platform.node()
# 37 sequences; in the epoch's last step, of one sequence, the second rank has none.
SMALL = (
    "--num_of_samples 60 --max_seq_length 128 --batch_size 2 --eval_samples 6 --num_workers 0 --num_proc 1 "
    "--learning_rate 1e-3 --log_interval 1 --eval_interval 3 --deterministic --mixed_precision fp32"
)
LIMIT = 300.0  # seconds, for a loaded machine
Patch = Callable[[int], None]  # change in a rank before it starts
_children = ExitStack()


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    yield
    _children.close()


def wait_until(condition: Callable[[], bool], job) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline and job.alive(), job.printed()
        time.sleep(0.02)


@dataclass
class Job:
    """The ranks of a run, and their output."""

    folder: Path
    output: Path
    ranks: list[BaseProcess]
    store: dist.TCPStore

    def wait(self) -> list[int]:
        """Return the exit codes."""
        deadline = time.monotonic() + LIMIT
        for process in self.ranks:
            process.join(max(0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.ranks]
        assert None not in codes, f"exit codes {codes}\n{self.printed()}"
        return codes

    def alive(self) -> bool:
        return self.ranks[0].is_alive()

    def printed(self) -> str:
        return "".join(path.read_text() for path in sorted(self.output.iterdir()))

    def errors(self) -> list[str]:
        return [line for line in self.printed().splitlines() if "error: " in line]

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: last_logged(self.folder) >= step, self)

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.printed(), self)


def one_rank(argv: list[str], environment: dict[str, str], output: Path, patch: Patch | None) -> None:
    """Run a command as torchrun, or nobody, would start it, in a process that has imported everything."""
    os.environ |= environment | {"OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    for number in (1, 2):
        os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    if patch:
        patch(int(environment.get("RANK", 0)))
    sys.argv = ["train_multi_gpu.py", *argv]
    code = run.main(argv, description="test", start=join_torchrun)
    sys.stdout.flush()
    os._exit(code)


def start(folder: Path, flags: str = "", *, ranks: int = 2, patch: Patch | None = None) -> Job:
    """Start a run on that many ranks, as torchrun does; on one rank without torchrun."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    argv = [*shlex.split(SMALL), "--output_dir", str(folder), *shlex.split(flags)]
    output = folder.with_name(f"{folder.name}.output.{time.monotonic_ns()}")
    output.mkdir(parents=True)
    processes = []
    for rank in range(ranks):
        environment = {}
        if ranks > 1:
            values = (rank, ranks, rank, ranks, "127.0.0.1", store.port)
            environment = {name: str(value) for name, value in zip(TORCHRUN, values, strict=True)}
            environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        child = forked(one_rank, argv, environment, output / f"rank{rank}", patch)
        processes.append(_children.enter_context(child))
    return Job(folder, output, processes, store)


def train(folder: Path, flags: str = "", *, ranks: int = 2, patch: Patch | None = None) -> Job:
    job = start(folder, flags, ranks=ranks, patch=patch)
    assert job.wait() == [0] * ranks, job.printed()
    return job


def curve(folder: Path, name: str) -> dict[int, float]:
    """Return a metric by step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


def losses(folder: Path) -> dict[int, float]:
    return curve(folder, "train/loss")


def last_logged(folder: Path) -> int:
    return max(losses(folder), default=0) if (folder / "metrics.jsonl").exists() else 0


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "export" / "model.safetensors")


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step_{step:06d}"


def saved(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Return whole weights and optimizer state of a checkpoint."""
    path = checkpoint(folder, step)
    kinds = json.loads((path / "manifest.json").read_text())["manifest"]["tensors"]
    tensors = {
        key: torch.empty(kind["shape"], dtype=getattr(torch, kind["dtype"].removeprefix("torch.")))
        for key, kind in kinds.items()
        if key.startswith(("model/", "optimizer/"))
    }
    Checkpoints(folder / "checkpoints", keep_last=1).load(path, tensors)
    return tensors


def last_checkpoint(folder: Path) -> str:
    checkpoints = Checkpoints(folder / "checkpoints", keep_last=5)
    checkpoints.verify(checkpoints.latest())
    return checkpoints.latest().name


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[name]) for name, t in one.items())


# The same run on any number of ranks, in any mode


def same_run(one: Path, other: Path, *, rel: float = 1e-5, skipped: tuple[int, ...] = ()) -> None:
    """Compare losses, gradient norms, evaluation, counts and weights; `skipped` steps are not finite."""
    # A CPU sums the squares of half a million FP32 numbers with an error of its own.
    for name, tolerance in {"train/loss": rel, "train/grad_norm": max(rel, 1e-4), "eval/loss": rel}.items():
        a, b = ({k: v for k, v in curve(f, name).items() if k not in skipped} for f in (one, other))
        assert a == pytest.approx(b, rel=tolerance) and a, name
    a, b = summary(one), summary(other)
    for name in ("steps", "tokens", "label_tokens", "eval_label_tokens", "skipped_steps"):
        assert a[name] == b[name], name
    a, b = exported(one), exported(other)
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        torch.testing.assert_close(b[name], tensor, rtol=2**-7, atol=10 * rel)  # a rounding of BF16


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Callable[[str], Path]:
    """The epoch on one device, with the global batch of two ranks, once for each set of flags."""
    done: dict[str, Path] = {}

    def run_once(flags: str = "") -> Path:
        if flags not in done:
            folder = tmp_path_factory.mktemp("reference") / "run"
            done[flags] = train(folder, f"--batch_size 4 {flags}", ranks=1).folder
        return done[flags]

    return run_once


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> dict[str, Path]:
    """The epoch on two ranks under FSDP with checkpoints, by precision; one is logged to W&B too."""
    folder = tmp_path_factory.mktemp("sharded")
    flags = "--sharding_mode fsdp_full --save_interval 3"
    more = {"fp32": "--use_wandb --wandb_mode offline", "bf16": "--mixed_precision bf16"}
    return {name: train(folder / name, f"{flags} {own}").folder for name, own in more.items()}


def check_group_timeouts(rank: int) -> None:
    """Every process group, also a library's, must wait as long as the watchdog."""
    fit = Trainer.fit

    def checked(trainer):
        timeouts = {g._get_backend(torch.device("cpu")).options._timeout for g in c10d._world.pg_map}
        assert timeouts == {PATIENCE}
        return fit(trainer)

    Trainer.fit = checked


@pytest.mark.parametrize(
    ("mode", "accumulation", "more"),
    [
        ("ddp", 1, {}),
        ("ddp", 2, {}),
        ("fsdp_full", 2, {}),
        ("fsdp_grad", 2, {}),
        ("fsdp_offload", 2, {}),
        ("hsdp", 1, {"ranks": 4}),  # two copies of the model, each over two ranks
        ("ds_zero2", 2, {}),
        ("ds_zero3", 2, {}),
    ],
)
def test_the_sharding_mode_does_not_change_the_run(mode, accumulation, more, reference, tmp_path):
    """Labels are masked unevenly: a mean of the ranks' means would show."""
    flags = f"--gradient_accumulation_steps {accumulation}"
    own = " --hsdp_shard_size 2 --batch_size 1" if mode == "hsdp" else ""
    job = train(tmp_path / "run", f"{flags} --sharding_mode {mode}{own}", patch=check_group_timeouts, **more)
    same_run(job.folder, reference(flags))
    assert ("the optimizer steps on the CPU" in job.printed()) == ("offload" in mode)
    assert summary(job.folder)["sharding_mode"] == mode


@pytest.mark.parametrize(("precision", "rel"), [("fp32", 1e-5), ("bf16", 2e-3)])
def test_fsdp_with_checkpoints_is_the_same_run(precision, rel, sharded, reference):
    flags = {"fp32": "--gradient_accumulation_steps 1", "bf16": "--mixed_precision bf16"}[precision]
    same_run(sharded[precision], reference(flags), rel=rel)


def test_a_model_that_only_transformers_can_read_is_sharded_too(reference, tmp_path):
    save_mixture(tmp_path / "model")
    flags = f"--model_name {tmp_path / 'model'} --tokenizer_name demo --no_export --max_steps 4"
    train(tmp_path / "run", f"{flags} --sharding_mode fsdp_offload")
    assert losses(tmp_path / "run") == pytest.approx(losses(reference(flags)), rel=1e-5)


@pytest.mark.parametrize("mode", ["ddp", "fsdp_full"])
def test_parameters_without_gradients_keep_their_values(reference, mode, tmp_path):
    save_model_with_images(tmp_path / "model")
    flags = f"--model_name {tmp_path / 'model'} --tokenizer_name demo --no_packing --max_steps 3"
    flags += " --weight_decay 0.5 --gradient_accumulation_steps 2"
    train(tmp_path / "run", f"{flags} --sharding_mode {mode}")
    assert losses(tmp_path / "run") == pytest.approx(losses(reference(f"{flags} --no_export")), rel=1e-4)
    before, after = (load_file(tmp_path / at / "model.safetensors") for at in ("model", "run/export"))
    assert before.keys() == after.keys()
    still = {name for name, tensor in before.items() if torch.equal(tensor.bfloat16(), after[name])}
    assert still == {name for name in before if "vision" in name or "projector" in name}


# Resume


def resume(folder: Path, origin: Path, step: int, flags: str = "", *, ranks: int = 2) -> Path:
    flags = f"--resume {checkpoint(origin, step)} --save_interval 3 {flags}"
    return train(folder, flags, ranks=ranks).folder


def rest(folder: Path, step: int) -> dict[int, float]:
    return {at: loss for at, loss in losses(folder).items() if at > step}


def test_a_run_resumes_on_one_rank_and_in_another_mode(sharded, tmp_path):
    whole = sharded["fp32"]
    one = resume(tmp_path / "one", whole, 3, "--batch_size 4", ranks=1)
    two = resume(tmp_path / "two", one, 6, "--sharding_mode ddp")
    for folder, step, ranks in ((one, 3, 1), (two, 6, 2)):
        assert losses(folder) == pytest.approx(rest(whole, step), rel=1e-6)
        assert summary(folder)["label_tokens"] == summary(whole)["label_tokens"]
        assert summary(folder)["world_size"] == ranks


def test_checkpoints_are_the_same_bits_on_any_ranks_and_in_any_mode(sharded, tmp_path):
    """Resumed from a run's end, so without a further step: 2 ranks -> 1 -> 3 -> 2."""
    expected, folder = saved(sharded["bf16"], 10), sharded["bf16"]
    for ranks, mode in ((1, ""), (3, "--sharding_mode fsdp_offload"), (2, "--sharding_mode fsdp_grad")):
        flags = f"--mixed_precision bf16 --no_export {mode}"
        folder = resume(tmp_path / str(ranks), folder, 10, flags, ranks=ranks)
        assert same_bits(saved(folder, 10), expected), (ranks, mode)


def test_more_ranks_with_the_same_batch_size_see_every_sample_once(sharded, tmp_path):
    """The global batch changes, with a warning; the data resumes at the next unseen sample."""
    flags = f"--resume {checkpoint(sharded['fp32'], 3)} --no_export --save_interval 1"
    job = train(tmp_path / "run", flags, ranks=3)
    warning = "saved on 2 ranks with a global batch of 4 sequences; it is 6 on 3"
    assert job.printed().count(warning) == 1
    whole, found = summary(sharded["fp32"]), summary(job.folder)
    assert (found["tokens"], found["label_tokens"]) == (whole["tokens"], whole["label_tokens"])
    assert found["steps"] == 3 + -(-(37 - 3 * 4) // 6)
    # Resumed once more, on as many ranks, the run keeps the length it was given.
    last = found["steps"] - 3
    again = resume(tmp_path / "again", job.folder, last, "--no_export", ranks=3)
    # Sums of three gradients round by their place in DDP's buckets, arranged anew after a first step.
    assert losses(again) == pytest.approx(rest(job.folder, last), rel=1e-6)
    assert summary(again)["tokens"] == found["tokens"]


def test_the_global_batch_may_be_split_differently_but_not_change(sharded, tmp_path):
    flags = "--batch_size 1 --gradient_accumulation_steps 2"
    folder = resume(tmp_path / "run", sharded["fp32"], 6, flags)
    assert losses(folder) == pytest.approx(rest(sharded["fp32"], 6), rel=1e-6)
    error = refused(start(tmp_path / "other", f"--resume {checkpoint(sharded['fp32'], 3)} --batch_size 1"))
    assert "--batch_size 2 there, 1 here" in error


# Signals


def delay(owner: type, name: str, seconds: float, rank: int = 0, message: str = "") -> None:
    """Have a method or function print `message` and take that much longer."""
    original = getattr(owner, name)

    def slower(*args, **kwargs):
        print(message, flush=True)
        time.sleep(seconds)
        return original(*args, **kwargs)

    setattr(owner, name, slower)


def slow(rank: int) -> None:
    """Make steps slow enough for a test to act in one."""
    delay(Trainer, "_step", 0.1)


def slow_export(rank: int) -> None:
    delay(run, "export", 2, message="exporting now")


def test_sigterm_to_one_rank_stops_all_and_the_same_command_resumes(sharded, tmp_path):
    flags = "--sharding_mode fsdp_full --save_interval 3"
    job = start(tmp_path / "run", flags, patch=slow)
    job.wait_for_step(1)
    for _ in range(2):
        os.kill(job.ranks[1].pid, signal.SIGTERM)
    assert job.wait() == [EXIT_INTERRUPTED] * 2
    assert f"--output_dir {job.folder}" in job.printed()
    stopped_at = last_logged(job.folder)
    assert stopped_at < 10 and not (job.folder / "summary.json").exists()
    saves = {path.name for path in (job.folder / "checkpoints").glob("step_*")}
    assert saves == {f"step_{step:06d}" for step in {*range(3, stopped_at + 1, 3), stopped_at}}
    train(job.folder, flags)
    assert losses(job.folder) == losses(sharded["fp32"])
    assert same_bits(exported(job.folder), exported(sharded["fp32"]))
    assert summary(job.folder)["tokens"] == summary(sharded["fp32"])["tokens"]


def test_a_signal_after_training_ends_no_rank(tmp_path):
    """All is saved, so the run finishes, with export and summary."""
    job = start(tmp_path / "run", "--max_steps 1", patch=slow_export)
    job.wait_for("exporting now")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(job.ranks[-1].pid, number)
    assert job.wait() == [0, 0], job.printed()
    assert summary(job.folder)["steps"] == 1 and exported(job.folder)


def test_a_second_signal_while_the_logs_are_finished_changes_nothing(tmp_path):
    patch = partial(delay, Tracker, "finish", 2, message="finishing the logs")
    job = start(tmp_path / "run", "--max_steps 400 --no_export", patch=patch)
    job.wait_for_step(1)
    os.kill(job.ranks[-1].pid, signal.SIGTERM)
    job.wait_for("finishing the logs")
    os.kill(job.ranks[-1].pid, signal.SIGTERM)
    assert job.wait() == [EXIT_INTERRUPTED] * 2, job.printed()


# Steps that are not finite on one rank


def spoil_two_steps(folder: Path, spoiled: int, rank: int) -> None:
    """On one rank, make the loss of step 2 NaN and the gradient of step 4 infinite; save the last weights."""
    step, forward, results = Trainer._step, HFCausalLM.forward, Trainer.results
    number = 0

    def counted(trainer, *args):
        nonlocal number
        number = trainer.progress.step + 1
        try:
            return step(trainer, *args)
        finally:
            number = 0

    def spoil(model, *args, **inputs):
        out = forward(model, *args, **inputs)
        if rank == spoiled and number == 2:
            return out._replace(loss=out.loss * float("nan"))
        if rank == spoiled and number == 4:
            out.loss.register_hook(lambda gradient: gradient * float("inf"))
        return out

    def save_weights(trainer):
        model = getattr(trainer.stack.model, "module", trainer.stack.model)
        weights = {name: getattr(p, "full_tensor", p.detach)() for name, p in model.named_parameters()}
        torch.save(weights, folder / f"weights{rank}.pt")
        return results(trainer)

    Trainer._step, HFCausalLM.forward, Trainer.results = counted, spoil, save_weights


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all(tmp_path):
    flags = "--max_steps 6 --save_interval 0 --eval_interval 0"
    one = train(
        tmp_path / "one", f"{flags} --batch_size 4", ranks=1, patch=partial(spoil_two_steps, tmp_path, 0)
    )
    for mode in ("ddp", "fsdp_full"):
        patch = partial(spoil_two_steps, tmp_path, 1)
        folder = train(tmp_path / mode, f"{flags} --sharding_mode {mode}", patch=patch).folder
        same_run(folder, one.folder, skipped=(2, 4))
        assert summary(folder)["skipped_steps"] == 2
        assert json.loads((checkpoint(folder, 6) / "meta.json").read_text())["optimizer_steps"] == 4
        first, second = (torch.load(tmp_path / f"weights{rank}.pt") for rank in range(2))
        assert same_bits(first, second)


# Ranks that fail, die or stall


def before_step(number: int, action: Callable[[], None], rank: int, *, whose: int = 1) -> None:
    """Have a rank do something before this step."""
    step = Trainer._step

    def changed(trainer, *args):
        if rank == whose and trainer.progress.step + 1 == number:
            action()
        return step(trainer, *args)

    Trainer._step = changed


def while_loading(number: int, action: Callable[[], None], rank: int) -> None:
    collate, calls = Layout.collate, count(1)

    def changed(layout, step):
        if rank == 1 and next(calls) == number:
            action()
        return collate(layout, step)

    Layout.collate = changed


def fail() -> None:
    raise KeyError("no such column")


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.\nmore of it")


def send_self(number: int) -> None:
    os.kill(os.getpid(), number)


halt, die = partial(send_self, signal.SIGSTOP), partial(send_self, signal.SIGKILL)
sleep = partial(time.sleep, 600)


@pytest.mark.parametrize(
    ("mode", "action", "message", "code"),
    [
        ("ddp", fail, "KeyError: 'no such column'", EXIT_FAILED),
        (
            "fsdp_full",
            run_out_of_memory,
            "CUDA out of memory. Try a smaller --batch_size",
            EXIT_OUT_OF_MEMORY,
        ),
    ],
)
def test_an_error_of_one_rank_ends_the_job_and_is_printed_once(mode, action, message, code, tmp_path):
    flags = f"--sharding_mode {mode} --save_interval 1"
    job = start(tmp_path / "run", flags, patch=partial(before_step, 3, action))
    codes = job.wait()
    assert codes[1] == code and codes[0] in (code, EXIT_FAILED)
    (error,) = job.errors()
    assert error.startswith(f"error: rank 1 ({HERE}): {message}")
    assert ("Traceback" in job.printed()) == (action is fail)
    assert last_checkpoint(job.folder) == "step_000002"


def fail_with_slow_logs(rank: int) -> None:
    delay(Tracker, "finish", 600, message="finishing the logs")
    before_step(2, fail, rank, whose=0)


def test_an_error_is_printed_before_the_logs_are_finished_and_ends_the_job_soon(tmp_path):
    job = start(tmp_path / "run", patch=fail_with_slow_logs)
    job.wait_for("finishing the logs")
    assert "error: rank 0" in job.printed() and "KeyError: 'no such column'" in job.printed()
    assert job.wait() == [EXIT_FAILED] * 2


def test_a_rank_that_is_killed_ends_the_job_and_is_named_once(tmp_path):
    flags = "--batch_size 1 --sharding_mode fsdp_full --save_interval 1"
    job = start(tmp_path / "run", flags, ranks=3, patch=partial(before_step, 3, die))
    assert job.wait() == [EXIT_FAILED, -signal.SIGKILL, EXIT_FAILED]
    gone = f"error: rank 1 ({HERE}) is gone: it was killed, or its node is lost. {AFTERWARDS}"
    assert job.errors() == [gone]
    assert last_checkpoint(job.folder) == "step_000002"


@pytest.mark.parametrize(
    ("patch", "whose", "message"),
    [
        (partial(before_step, 3, halt), 1, "is silent, last"),
        (partial(while_loading, 3, sleep), 1, "loading the data of step 3 for"),
        # The first rank writes and checks more files of a checkpoint than the others.
        (partial(before_step, 4, sleep, whose=0), 0, "loading the data of step 4 for"),
    ],
    ids=["stopped", "asleep", "the first rank"],
)
def test_a_rank_that_stalls_ends_the_job_and_is_named(patch, whose, message, tmp_path):
    flags = "--sharding_mode fsdp_full --save_interval 1 --timeout_minutes 0.1"
    job = start(tmp_path / "run", flags, patch=patch)
    job.ranks[1 - whose].join(LIMIT)
    assert job.ranks[1 - whose].exitcode == EXIT_FAILED
    (error,) = job.errors()
    stalled = f"no progress for 6 s; rank {whose} ({HERE}) {message}"
    assert error.startswith(f"error: --timeout_minutes 0.1: {stalled}") and f"rank {1 - whose} (" not in error
    assert last_checkpoint(job.folder) == f"step_{2 if whose else 3:06d}"


def lose_the_store(rank: int) -> None:
    """Lose it for three seconds of the first step, or from then on on rank 1, which also stalls."""
    watchdog.SILENCE_SECONDS = 1.0
    send, lost = Watchdog._send, []

    def changed(dog):
        if dog._progress:
            lost.append(time.monotonic())
            if rank == 1 or lost[-1] - lost[0] < 3:
                raise dist.DistStoreError("a timeout")
        send(dog)

    Watchdog._send = changed
    before_step(2, sleep, rank)


def test_a_rank_that_has_lost_the_store_still_ends_a_job_that_stalls(tmp_path):
    job = start(tmp_path / "run", "--timeout_minutes 0.1", patch=lose_the_store)
    assert EXIT_FAILED in job.wait()
    assert "error: --timeout_minutes 0.1: no progress for 6 s" in job.printed()


def halt_impatiently(rank: int) -> None:
    watchdog.SILENCE_SECONDS = 2.0
    before_step(3, halt, rank)


def test_a_silent_rank_ends_the_job_long_before_the_timeout(tmp_path):
    job = start(tmp_path / "run", "--save_interval 1", patch=halt_impatiently)
    job.ranks[0].join(LIMIT)
    assert job.ranks[0].exitcode == EXIT_FAILED
    (error,) = job.errors()
    assert error.startswith(f"error: rank 1 ({HERE}) is silent, last ")
    assert "it was killed, or its node is gone" in error


def slow_and_impatient(rank: int) -> None:
    """Also with a store in which every other heartbeat of rank 1 fails."""
    watchdog.SILENCE_SECONDS = 3.0
    slow(rank)
    send, count = Watchdog._send, iter(range(10**6))

    def stutter(dog):
        if rank == 1 and next(count) % 2:
            raise dist.DistStoreError("a timeout")
        send(dog)

    Watchdog._send = stutter


def test_a_job_that_is_suspended_or_has_a_slow_store_continues(tmp_path):
    """Both ranks come back to clocks by which the other one was silent, and itself without progress."""
    flags = "--max_steps 12 --timeout_minutes 0.05 --no_export"
    job = start(tmp_path / "run", flags, patch=slow_and_impatient)
    job.wait_for_step(3)
    for number, seconds in ((signal.SIGSTOP, 5.0), (signal.SIGCONT, 0.0)):
        for process in job.ranks:
            os.kill(process.pid, number)
        time.sleep(seconds)
    assert job.wait() == [0, 0], job.printed()


def slow_start_and_end(rank: int) -> None:
    if rank == 1:
        delay(prepare, "_load_data", 8)
    delay(Tracker, "finish", 8)
    delay(run, "answer", 8)


def test_before_the_first_step_and_after_the_last_a_rank_may_take_longer_than_the_timeout(tmp_path):
    """Samples are generated when the other ranks are gone."""
    flags = "--max_steps 1 --generate_samples 1 --timeout_minutes 0.05"
    job = train(tmp_path / "run", flags, patch=slow_start_and_end)
    assert "ANSWER" in (job.folder / "samples.txt").read_text()


def stall_at_start(method: str, whose: int, rank: int) -> None:
    prepare.DATA_SECONDS, watchdog.START_SECONDS = 8.0, 7.0
    if rank == whose:
        setattr(run if method == "assemble" else prepare, method, lambda *_, **__: sleep())


@pytest.mark.parametrize(
    ("method", "whose", "doing", "limit"),
    [
        ("_load_data", 1, "loading the data", 8),
        ("_find_checkpoint", 0, "looking for a checkpoint", 7),
        ("assemble", 1, "building the model", 7),
    ],
)
def test_a_rank_that_stalls_before_the_first_step_is_named(method, whose, doing, limit, tmp_path):
    patch = partial(stall_at_start, method, whose)
    job = start(tmp_path / "run", "--timeout_minutes 0.1", patch=patch)
    assert EXIT_FAILED in job.wait()
    (error,) = job.errors()
    stalled = f"no progress for {limit} s; rank {whose} ({HERE}) {doing} for"
    assert error.startswith(f"error: --timeout_minutes 0.1: {stalled}")


# Ranks that do not fit together


def choose_differently(rank: int) -> None:
    """As on GPUs of different sizes."""
    memory.choose_mode = lambda *_: (("ddp", "fsdp_full")[rank], "so")


def test_the_first_rank_chooses_the_mode_for_all(tmp_path):
    job = train(tmp_path / "run", "--max_steps 1", patch=choose_differently)
    assert summary(job.folder)["sharding_mode"] == "ddp"


def refused(job: Job) -> str:
    """Return the one line that ends a job which cannot start."""
    assert job.wait() == [EXIT_BAD_SETTING] * len(job.ranks), job.printed()
    assert "Traceback" not in job.printed()
    (error,) = job.errors()
    return error


def other_seed(rank: int) -> None:
    if rank == 1:
        parse = run.parse_config
        run.parse_config = lambda argv, **kwargs: parse([*argv, "--seed", "7"], **kwargs)


def other_software(rank: int) -> None:
    if rank == 1:
        found = prepare.software() | {"torch": "1.0"}
        prepare.software = lambda: found


def other_recipe(rank: int) -> None:
    """As if one node's GPUs or libraries could not run what the others can."""
    if rank == 1:
        original = resolve.precision.resolve_precision
        resolve.precision.resolve_precision = lambda cfg: replace(original(cfg), effective="bf16")


def fewer_samples_to_evaluate(rank: int) -> None:
    """Some ranks would wait in a collective of an evaluation that the others have left."""
    if rank == 1:
        sample = Split.sample
        Split.sample = lambda split, count: sample(split, count - 12)


EVALUATED = "--dataset_name demo --eval_split test --eval_samples 16 --no_packing --eval_batch_size 1"


@pytest.mark.parametrize(
    ("patch", "flags", "message"),
    [
        (other_seed, "", r"the settings differ on rank 1 \(.*\): seed 7 \(rank 0: 42\)"),
        (other_software, "", r"the software differ on rank 1 \(.*\): torch 1.0 \(rank 0: "),
        (other_recipe, "", r"what can run differ on rank 1 \(.*\): recipe bf16 \(rank 0: "),
        (fewer_samples_to_evaluate, EVALUATED, r"the data differ on rank 1 \(.*\): evaluation "),
    ],
)
def test_ranks_that_would_do_different_work_are_refused(patch, flags, message, tmp_path):
    assert re.search(message, refused(start(tmp_path / "run", flags, patch=patch)))


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
        for name, found in texts.items():
            lines = "".join(json.dumps({"text": text}) + "\n" for text in found)
            (tmp_path / str(rank) / f"{name}.jsonl").write_text(lines)
        zero = {"zero_optimization": {"stage": 1 + rank}}
        (tmp_path / str(rank) / "mine.json").write_text(json.dumps(zero))
    flags, message = DIFFERENT_FILES[kind]
    error = refused(start(tmp_path / "run", flags, patch=partial(in_own_folder, tmp_path)))
    assert re.search(message, error), error


def other_model(folder: Path, rank: int) -> None:
    if rank == 1:
        plan = resolve.build.plan_model
        resolve.build.plan_model = lambda *args, **kw: replace(plan(*args, **kw), weights=folder)


def test_ranks_with_different_weights_of_one_model_are_refused(sharded, tmp_path):
    """Each rank reads its shards from its own disk: a model of two revisions would train."""
    own, changed = sharded["fp32"] / "export", tmp_path / "changed"
    shutil.copytree(own, changed)
    name = changed / "model.safetensors"
    save_file({key: tensor + 1 for key, tensor in load_file(name).items()}, name, metadata={"format": "pt"})
    flags = f"--model_name {own} --tokenizer_name demo --sharding_mode fsdp_full"
    error = refused(start(tmp_path / "run", flags, patch=partial(other_model, changed)))
    assert re.search(r"the model's files differ on rank 1 \(.*\): weights ", error)


def test_more_ranks_than_sequences_are_refused(tmp_path):
    error = refused(start(tmp_path / "run", "--num_of_samples 10 --batch_size 4", ranks=3))
    assert "--batch_size 4: on 3 ranks a micro-batch needs 12 sequences, but --split_name train_1M" in error


def library_error(rank: int) -> None:
    if rank == 1:
        prepare.build_loaders = lambda *args, **kwargs: json.loads("{")  # a ValueError


def test_a_library_s_error_on_one_rank_has_the_traceback_of_that_rank(tmp_path):
    """Whichever rank prints it; it is not about a setting."""
    job = start(tmp_path / "run", patch=library_error)
    assert job.wait() == [EXIT_FAILED] * 2
    (error,) = job.errors()
    assert re.match(r"error: rank 1 \(.*\): JSONDecodeError: ", error)
    assert job.printed().count("Traceback") == 1 and "raw_decode" in job.printed()


# Before the ranks meet


@pytest.mark.parametrize(("local", "prints"), [("0", True), ("1", False)])
def test_a_bad_setting_is_printed_before_torchrun_ends_the_rank_that_prints(
    local, prints, monkeypatch, capsys
):
    waited = []
    monkeypatch.setattr(outcome.time, "sleep", waited.append)
    monkeypatch.setenv("LOCAL_RANK", local)
    monkeypatch.setenv("RANK", local)
    assert outcome.report_failure(bad_setting("must be at least 1", batch_size=0), None) == EXIT_BAD_SETTING
    assert ("--batch_size 0" in capsys.readouterr().err) == prints
    assert bool(waited) == (not prints)


def too_few_gpus(rank: int) -> None:
    if rank == 1:
        os.environ["LOCAL_RANK"] = "0"  # the first of another node
        torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 1)


def broken_driver(rank: int) -> None:
    """torch has no GPU to set here."""
    if rank == 1:
        torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 2)


def test_a_rank_that_cannot_join_ends_the_others_at_once(tmp_path):
    """Not once they have waited for --timeout_minutes."""
    job = start(tmp_path / "fewer", patch=too_few_gpus)
    assert job.wait() == [EXIT_BAD_SETTING] * 2
    here = f"--nproc_per_node 2: {HERE} has 1 GPUs; start one rank per GPU"
    assert job.errors() == [f"error: rank 1 ({HERE}): {here}", f"error: {here}"]
    job = start(tmp_path / "broken", patch=broken_driver)
    assert job.wait()[0] == EXIT_FAILED
    errors = [line for line in job.printed().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and f"rank 1 ({HERE}): " in errors[0]


@pytest.mark.parametrize(
    ("script", "variable", "way_out"),
    [
        ("train_fp8.py", "WORLD_SIZE", "use torchrun --nproc_per_node=N train_multi_gpu.py"),
        ("train_multi_gpu.py", "SLURM_STEP_NUM_TASKS", "needs RANK, WORLD_SIZE, LOCAL_RANK, .* under Slurm"),
    ],
)
def test_several_processes_without_a_job_are_refused(script, variable, way_out, tmp_path):
    """Each would train the same run once more."""
    flags = [*shlex.split(SMALL), "--output_dir", str(tmp_path / "run")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", variable: "2"}
    done = subprocess.run(
        [sys.executable, script, *flags], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == EXIT_BAD_SETTING and not (tmp_path / "run").exists()
    assert re.fullmatch(f"error: {variable}=2: {script} .*{way_out}.*\n", done.stderr), done.stderr


def test_without_torchrun_a_run_is_on_one_device_with_a_warning(tmp_path):
    flags = "--sharding_mode fsdp_full --max_steps 1 --no_export --no_save_checkpoints"
    job = train(tmp_path / "run", flags, ranks=1)
    assert "not started by torchrun: running on one device" in job.printed()
    assert "--sharding_mode fsdp_full ignored: one device, nothing to shard" in job.printed()
    assert summary(job.folder)["sharding_mode"] == "single"


# Files


def test_only_the_first_rank_logs_and_a_finished_run_stays_unchanged(sharded):
    folder = sharded["fp32"]
    assert list(losses(folder)) == list(range(1, 11))
    assert len(list(folder.rglob("offline-run-*"))) == 1
    assert {p.name for p in folder.parent.iterdir() if (p / "config.json").exists()} == set(sharded)
    found, environment = summary(folder), json.loads((folder / "env.json").read_text())
    assert (found["world_size"], found["nodes"], found["gpus"]) == (2, 1, 0)
    assert (environment["world_size"], environment["hosts"]) == (2, [HERE])
    before = (folder / "summary.json").read_text(), exported(folder)
    job = train(folder, "--sharding_mode fsdp_full --save_interval 3")
    assert "this run is finished" in job.printed()
    assert (folder / "summary.json").read_text() == before[0] and same_bits(exported(folder), before[1])


# Under torchrun itself


class Torchrun:
    """A torchrun command and its ranks."""

    def __init__(self, folder: Path, flags: str, options: str = "--standalone --nproc_per_node=2"):
        command = [sys.executable, "-m", "torch.distributed.run", *shlex.split(options), "train_multi_gpu.py"]
        self.folder = folder
        self.agent = _children.enter_context(
            running(
                [*command, *shlex.split(SMALL), "--output_dir", str(folder), *shlex.split(flags)],
                cwd=ROOT,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )

    def pid(self, rank: int) -> int:
        """Return the process of a rank, which is a process group of its own."""
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                environment = (path / "environ").read_bytes().split(b"\0")
                if parent == self.agent.pid and f"RANK={rank}".encode() in environment:
                    return int(path.name)
        raise AssertionError(f"no rank {rank}")

    def alive(self) -> bool:
        return self.agent.poll() is None

    def printed(self) -> str:
        return self.agent.communicate(timeout=LIMIT)[0]

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: last_logged(self.folder) >= step, self)


def test_a_bad_setting_is_printed_once_under_torchrun(tmp_path):
    job = Torchrun(tmp_path / "run", "--model_name /nowhere")
    output = job.printed()
    assert job.agent.returncode != 0
    assert len(re.findall(r"^error: .*--model_name /nowhere", output, re.M)) == 1


def test_torchrun_restarts_a_killed_rank_and_the_same_command_a_stopped_job(sharded, tmp_path):
    """With --max_restarts all ranks restart and resume; SIGTERM to one of them saves and ends the job."""
    folder, flags = tmp_path / "run", "--sharding_mode fsdp_full --save_interval 3"
    job = Torchrun(folder, flags, "--standalone --nproc_per_node=2 --max_restarts=1")
    job.wait_for_step(4)  # so that step 3 is saved
    os.kill(job.pid(1), signal.SIGKILL)
    wait_until((folder / "metrics.discarded.jsonl").exists, job)
    job.wait_for_step(4)
    os.kill(job.pid(1), signal.SIGTERM)
    output = job.printed()
    assert job.agent.returncode == 1, output
    for part in ("resumed from", "stopped by a signal", f"exitcode: {EXIT_INTERRUPTED}"):
        assert part in re.sub(" +:", ":", output), output
    assert not (folder / "summary.json").exists()
    train(folder, flags)
    assert losses(folder) == losses(sharded["fp32"])
    assert same_bits(exported(folder), exported(sharded["fp32"]))


def test_a_rank_ends_with_its_exit_handlers_but_without_tearing_python_down():
    """Threads that outlive their process group abort a process that is torn down."""
    code = """
import atexit, sys
from training.outcome import exit_process

class Held:
    def __del__(self):
        print("torn down")

held = Held()
atexit.register(print, "exit handler")
sys.stdout.write("not flushed, ")
exit_process(75)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (75, "not flushed, exit handler\n"), done.stderr


def two_nodes() -> tuple[str, int]:
    """Return torchrun's options for two agents on this machine, and the port of the first one's store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = f"--rdzv_backend=c10d --rdzv_endpoint=localhost:{port}"
    return f"--nnodes=2 --nproc_per_node=1 {where}", port


def test_a_node_whose_ranks_cannot_start_ends_the_others(tmp_path):
    """Otherwise they would wait for --timeout_minutes."""
    options, port = two_nodes()
    waiting = Torchrun(tmp_path / "run", "", options)
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:  # until it has the job's store, which ends with its host
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port)):
            break
        time.sleep(0.1)
    wrong = Torchrun(tmp_path / "run", "--config only_there.yaml", options)
    outputs = [wrong.printed(), waiting.printed()]
    assert wrong.agent.returncode == waiting.agent.returncode == 1
    assert re.search(r"^error: --config only_there.yaml: ", outputs[0], re.M), outputs[0]
    assert re.search(r"^error: rank . \(.*\): --config only_there.yaml: ", outputs[1], re.M), outputs[1]


def test_two_nodes_train_together(reference, tmp_path):
    options, _ = two_nodes()
    nodes = [Torchrun(tmp_path / "run", "--sharding_mode fsdp_full", options) for _ in range(2)]
    outputs = [node.printed() for node in nodes]
    assert [node.agent.returncode for node in nodes] == [0, 0], outputs
    assert sum("on 2 x cpu on 2 nodes, fsdp_full" in output for output in outputs) == 1
    same_run(tmp_path / "run", reference("--gradient_accumulation_steps 1"))
    found = summary(tmp_path / "run")
    assert found["nodes"] == found["world_size"] == 2
    assert found["node_hours"] == pytest.approx(2 * found["runtime_seconds"] / 3600)
