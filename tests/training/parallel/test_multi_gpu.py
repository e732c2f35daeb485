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
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers.models.llama.modeling_llama  # noqa: F401  (what a run imports on its way)
from safetensors.torch import load_file, save_file
from torch.distributed import distributed_c10d as c10d

from core.errors import EXIT_BAD_SETTING, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OUT_OF_MEMORY, UserError
from data import order
from data.order import Layout
from data.samples import Split
from te_models.hugging_face import HFCausalLM
from tests.children import children, preload
from tests.hugging_face_models import save_mixture, save_model_with_images
from train_multi_gpu import join_torchrun
from training import outcome, prepare, resolve, run
from training.checkpoint.store import Checkpoints
from training.config import config_from_dict
from training.parallel import choose, watchdog
from training.parallel.ranks import PATIENCE, TORCHRUN, agree_on_start
from training.parallel.watchdog import Watchdog
from training.tracking.tracker import Tracker
from training.trainer import Trainer

preload(__name__)

ROOT = Path(__file__).resolve().parents[3]
MODES = ("ddp", "fsdp_full", "fsdp_grad", "fsdp_offload", "hsdp")
# 37 sequences; in the epoch's last step, of one sequence, the second rank has none.
SMALL = (
    "--num_of_samples 60 --max_seq_length 128 --batch_size 2 --eval_samples 6 --num_workers 0 --num_proc 1 "
    "--learning_rate 1e-3 --log_interval 1 --eval_interval 3 --deterministic --mixed_precision fp32"
)
Patch = Callable[[int], None]  # what a test changes in a rank before it starts


@dataclass
class Job:
    """The ranks of a run, and what they print."""

    folder: Path
    output: Path
    ranks: list[BaseProcess]
    store: dist.TCPStore

    def wait(self, timeout: float = 120) -> list[int]:
        """Exit codes; no rank may still run after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        for process in self.ranks:
            process.join(max(0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.ranks]
        for process in self.ranks:
            process.kill()
        assert None not in codes, f"exit codes {codes} after {timeout} s\n{self.printed()}"
        return codes

    def printed(self) -> str:
        return "".join(path.read_text() for path in sorted(self.output.iterdir()))

    def errors(self) -> list[str]:
        return [line for line in self.printed().splitlines() if "error: " in line]


def one_rank(argv: list[str], environment: dict[str, str], output: Path, patch: Patch | None) -> None:
    """A command that torchrun, or nobody, started; in a process that has imported everything already."""
    os.environ |= environment | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
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
        arguments = (argv, environment, output / f"rank{rank}", patch)
        processes.append(children.Process(target=one_rank, args=arguments))
        processes[-1].start()
    return Job(folder, output, processes, store)


def train(folder: Path, flags: str = "", *, ranks: int = 2, patch: Patch | None = None) -> Job:
    """A run to its end."""
    job = start(folder, flags, ranks=ranks, patch=patch)
    codes = job.wait()
    assert codes == [0] * ranks, job.printed()
    return job


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curve(folder: Path, name: str) -> dict[int, float]:
    """A metric by step."""
    return {line["step"]: line[name] for line in lines(folder) if name in line}


def losses(folder: Path) -> dict[int, float]:
    return curve(folder, "train/loss")


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "export" / "model.safetensors")


def saved(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of a checkpoint, whole."""
    path = folder / "checkpoints" / f"step_{step:06d}"
    kinds = json.loads((path / "manifest.json").read_text())["manifest"]["tensors"]
    tensors = {
        key: torch.empty(kind["shape"], dtype=getattr(torch, kind["dtype"].removeprefix("torch.")))
        for key, kind in kinds.items()
        if key.startswith(("model/", "optimizer/"))
    }
    Checkpoints(folder / "checkpoints", keep_last=1).load(path, tensors)
    return tensors


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[name]) for name, t in one.items())


# The same run on any number of ranks, in any mode


def same_run(one: Path, other: Path, *, rel: float = 1e-5, skipped: tuple[int, ...] = ()) -> None:
    """Losses, gradient norms, evaluation, counts and weights; those of skipped steps are not finite."""
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
def reference(tmp_path_factory):
    """The epoch on one device, with the global batch of two ranks; each with its flags is run once."""
    done: dict[str, Path] = {}

    def run_once(flags: str = "") -> Path:
        if flags not in done:
            folder = tmp_path_factory.mktemp("reference") / "run"
            done[flags] = train(folder, f"--batch_size 4 {flags}", ranks=1).folder
        return done[flags]

    return run_once


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> dict[str, Path]:
    """The epoch on two ranks under FSDP, saved on the way, by precision; one is logged to W&B too."""
    folder = tmp_path_factory.mktemp("sharded")
    flags = "--sharding_mode fsdp_full --save_interval 3"
    more = {"fp32": "--use_wandb --wandb_mode offline", "bf16": "--mixed_precision bf16"}
    return {name: train(folder / name, f"{flags} {own}").folder for name, own in more.items()}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("mode", [*MODES, "ds_zero2", "ds_zero3"])
def test_the_sharding_mode_does_not_change_the_run(mode, accumulation, reference, tmp_path):
    """Labels are masked unevenly, and a mean of the ranks' means would show."""
    flags = f"--gradient_accumulation_steps {accumulation}"
    shards = "--hsdp_shard_size 1" if mode == "hsdp" else ""
    said = train(tmp_path / "run", f"{flags} --sharding_mode {mode} {shards}").printed()
    same_run(tmp_path / "run", reference(flags))
    assert ("the optimizer steps on the CPU" in said) == ("offload" in mode)
    assert summary(tmp_path / "run")["sharding_mode"] == mode


@pytest.mark.parametrize("mode", ["fsdp_full", "fsdp_offload"])
def test_a_model_that_only_transformers_can_read_is_sharded_too(reference, mode, tmp_path):
    save_mixture(tmp_path / "model")
    flags = f"--model_name {tmp_path / 'model'} --tokenizer_name demo --no_export --max_steps 4"
    train(tmp_path / "run", f"{flags} --sharding_mode {mode}")
    assert losses(tmp_path / "run") == pytest.approx(losses(reference(flags)), rel=1e-5)


@pytest.mark.parametrize("mode", ["ddp", "fsdp_full"])
def test_parameters_that_text_never_reaches_stay_as_they_are(reference, mode, tmp_path):
    save_model_with_images(tmp_path / "model")
    flags = f"--model_name {tmp_path / 'model'} --tokenizer_name demo --no_packing --max_steps 3"
    flags += " --weight_decay 0.5 --gradient_accumulation_steps 2"
    train(tmp_path / "run", f"{flags} --sharding_mode {mode}")
    assert losses(tmp_path / "run") == pytest.approx(losses(reference(f"{flags} --no_export")), rel=1e-4)
    before, after = (load_file(tmp_path / at / "model.safetensors") for at in ("model", "run/export"))
    assert before.keys() == after.keys()
    still = {name for name, tensor in before.items() if torch.equal(tensor.bfloat16(), after[name])}
    assert still == {name for name in before if "vision" in name or "projector" in name}


def test_hsdp_over_four_ranks_does_not_change_the_run(reference, tmp_path):
    """Two copies of the model, each over two ranks."""
    flags = "--gradient_accumulation_steps 1"
    train(tmp_path / "run", f"{flags} --batch_size 1 --sharding_mode hsdp --hsdp_shard_size 2", ranks=4)
    same_run(tmp_path / "run", reference(flags))


def test_bf16_over_two_ranks_stays_close(sharded, reference):
    same_run(sharded["bf16"], reference("--mixed_precision bf16"), rel=2e-3)


# Resume


def go_on(folder: Path, origin: Path, step: int, flags: str, *, ranks: int) -> Path:
    checkpoint = origin / "checkpoints" / f"step_{step:06d}"
    return train(folder, f"--resume {checkpoint} --save_interval 3 {flags}", ranks=ranks).folder


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_goes_on_over_two_one_and_two_ranks_and_between_modes(precision, sharded, tmp_path):
    whole, given = sharded[precision], f"--mixed_precision {precision}"
    one = go_on(tmp_path / "one", whole, 3, f"{given} --batch_size 4", ranks=1)
    two = go_on(tmp_path / "two", one, 6, f"{given} --sharding_mode ddp", ranks=2)
    tolerance = {"fp32": 1e-6, "bf16": 1e-3}[precision]  # in BF16 the order of sums shows
    for folder, first in ((one, 4), (two, 7)):
        expected = {step: loss for step, loss in losses(whole).items() if step >= first}
        assert losses(folder) == pytest.approx(expected, rel=tolerance)
        assert summary(folder)["label_tokens"] == summary(whole)["label_tokens"]
    assert (summary(one)["world_size"], summary(two)["world_size"]) == (1, 2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_saved_is_the_same_bit_by_bit_on_any_ranks_and_in_any_mode(precision, sharded, tmp_path):
    """From a run's end, where there is no further step: 2 ranks -> 1 -> 3 -> 2."""
    given = f"--mixed_precision {precision} --no_export"
    expected, folder = saved(sharded[precision], 10), sharded[precision]
    for ranks, mode in ((1, ""), (3, "fsdp_offload"), (2, "ddp"), (2, "fsdp_grad")):
        flags = f"{given} --sharding_mode {mode}" if mode else given
        folder = go_on(tmp_path / f"{ranks}{mode}", folder, 10, flags, ranks=ranks)
        assert same_bits(saved(folder, 10), expected), (ranks, mode)


@pytest.mark.parametrize("ranks", [1, 3])
def test_more_or_fewer_ranks_with_the_same_batch_size_see_every_sample_once(ranks, sharded, tmp_path):
    """The global batch changes, which is said; the data goes on at the next unseen sample."""
    checkpoint = sharded["fp32"] / "checkpoints" / "step_000003"
    flags = f"--resume {checkpoint} --no_export --save_interval 1"
    job = train(tmp_path / "run", flags, ranks=ranks)
    old, new = 4, 2 * ranks
    warning = f"saved on 2 ranks with a global batch of {old} sequences, which is {new} on {ranks}"
    assert job.printed().count(f"WARNING: {warning}") == 1
    whole, found = summary(sharded["fp32"]), summary(job.folder)
    assert (found["tokens"], found["label_tokens"]) == (whole["tokens"], whole["label_tokens"])
    assert found["steps"] == 3 + -(-(37 - 3 * old) // new)
    # Resumed once more, on as many ranks, the run keeps the length it was given.
    last = found["steps"] - 3
    again = go_on(tmp_path / "again", job.folder, last, "--no_export", ranks=ranks)
    expected = {step: loss for step, loss in losses(job.folder).items() if step > last}
    # Sums of three gradients round by their place in DDP's buckets, arranged anew after a first step.
    assert losses(again) == pytest.approx(expected, rel=1e-6)
    assert summary(again)["tokens"] == found["tokens"]


def test_another_global_batch_on_the_same_ranks_is_refused(sharded, tmp_path):
    checkpoint = sharded["fp32"] / "checkpoints" / "step_000003"
    job = start(tmp_path / "run", f"--resume {checkpoint} --batch_size 1")
    assert job.wait() == [EXIT_BAD_SETTING] * 2
    (error,) = job.errors()
    assert "--batch_size 2 there, 1 here" in error and "Traceback" not in job.printed()


def test_the_same_global_batch_may_be_split_otherwise(sharded, tmp_path):
    flags = "--batch_size 1 --gradient_accumulation_steps 2"
    folder = go_on(tmp_path / "run", sharded["fp32"], 6, flags, ranks=2)
    expected = {step: loss for step, loss in losses(sharded["fp32"]).items() if step > 6}
    assert losses(folder) == pytest.approx(expected, rel=1e-6)


# Signals


def wait_for_step(job: Job, step: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and job.ranks[0].is_alive():
        if (job.folder / "metrics.jsonl").exists() and max(losses(job.folder), default=0) >= step:
            return
        time.sleep(0.01)
    raise AssertionError(job.printed())


def slow(rank: int) -> None:
    """Steps of a tenth of a second and more, so that a test is in time for one."""
    step = Trainer._step

    def slower(trainer, *rest):
        time.sleep(0.1)
        return step(trainer, *rest)

    Trainer._step = slower


def test_sigterm_to_one_rank_stops_all_and_the_same_command_goes_on(sharded, tmp_path):
    flags = "--sharding_mode fsdp_full --save_interval 3"
    job = start(tmp_path / "run", flags, patch=slow)
    wait_for_step(job, 1)
    for _ in range(2):
        os.kill(job.ranks[1].pid, signal.SIGTERM)
    assert job.wait() == [EXIT_INTERRUPTED] * 2
    *_, way_on, last = job.printed().strip().splitlines()
    assert last == f"run folder: {job.folder}" and f"--output_dir {job.folder}" in way_on
    stopped_at = max(losses(job.folder))
    assert stopped_at < 10 and not (job.folder / "summary.json").exists()
    saves = {path.name for path in (job.folder / "checkpoints").glob("step_*")}
    assert saves == {f"step_{step:06d}" for step in {*range(3, stopped_at + 1, 3), stopped_at}}
    train(job.folder, flags)
    assert losses(job.folder) == losses(sharded["fp32"])
    assert same_bits(exported(job.folder), exported(sharded["fp32"]))
    assert summary(job.folder)["tokens"] == summary(sharded["fp32"])["tokens"]


def with_slow(owner: type, name: str, message: str, seconds: float, rank: int) -> None:
    """Have a method of this class say so and take so many seconds more."""
    method = getattr(owner, name)

    def slower(*args, **words):
        print(message, flush=True)
        time.sleep(seconds)
        return method(*args, **words)

    setattr(owner, name, slower)


def wait_for_words(job: Job, words: str) -> None:
    deadline = time.monotonic() + 120
    while words not in job.printed():
        assert time.monotonic() < deadline and job.ranks[0].is_alive(), job.printed()
        time.sleep(0.02)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_after_training_ends_no_rank_alone(ranks, tmp_path):
    """All is saved, so the run is finished, export and summary included."""
    patch = partial(with_slow, run, "export", "exporting now", 2)
    job = start(tmp_path / "run", "--max_steps 1", ranks=ranks, patch=patch)
    wait_for_words(job, "exporting now")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(job.ranks[-1].pid, number)
    assert job.wait() == [0] * ranks, job.printed()
    assert summary(job.folder)["steps"] == 1 and exported(job.folder)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_signal_while_the_logs_are_finished_changes_nothing(ranks, tmp_path):
    patch = partial(with_slow, Tracker, "finish", "finishing the logs", 2)
    job = start(tmp_path / "run", "--max_steps 400 --no_export", ranks=ranks, patch=patch)
    wait_for_step(job, 1)
    os.kill(job.ranks[-1].pid, signal.SIGTERM)
    wait_for_words(job, "finishing the logs")
    os.kill(job.ranks[-1].pid, signal.SIGTERM)
    assert job.wait() == [EXIT_INTERRUPTED] * ranks, job.printed()


# Not finite, on one rank


def spoil_two_steps(folder: Path, spoiled: int, rank: int) -> None:
    """Step 2 has a loss that is NaN on one rank, step 4 a finite one with a gradient that is not.

    Every rank leaves its weights of the end behind.
    """
    take_step, forward, results = Trainer._step, HFCausalLM.forward, Trainer.results
    number = 0

    def counted(trainer, *rest):
        nonlocal number
        number = trainer.progress.step + 1
        try:
            return take_step(trainer, *rest)
        finally:
            number = 0

    def spoil(model, *args, **inputs):
        out = forward(model, *args, **inputs)
        if rank == spoiled and number == 2:
            return out._replace(loss=out.loss * float("nan"))
        if rank == spoiled and number == 4:
            out.loss.register_hook(lambda gradient: gradient * float("inf"))
        return out

    def leave_weights(trainer):
        model = getattr(trainer.stack.model, "module", trainer.stack.model)
        weights = {name: getattr(p, "full_tensor", p.detach)() for name, p in model.named_parameters()}
        torch.save(weights, folder / f"weights{rank}.pt")
        return results(trainer)

    Trainer._step, HFCausalLM.forward, Trainer.results = counted, spoil, leave_weights


@pytest.mark.parametrize("mode", ["ddp", "fsdp_full"])
def test_a_step_that_is_not_finite_on_one_rank_is_taken_by_none(mode, tmp_path):
    """As if a single device had skipped these steps."""
    flags = "--max_steps 6 --save_interval 0 --eval_interval 0"
    alone = train(
        tmp_path / "alone", f"{flags} --batch_size 4", ranks=1, patch=partial(spoil_two_steps, tmp_path, 0)
    )
    job = train(
        tmp_path / "run", f"{flags} --sharding_mode {mode}", patch=partial(spoil_two_steps, tmp_path, 1)
    )
    same_run(job.folder, alone.folder, skipped=(2, 4))
    assert summary(job.folder)["skipped_steps"] == 2
    meta = json.loads((job.folder / "checkpoints" / "step_000006" / "meta.json").read_text())
    assert meta["optimizer_steps"] == 4
    assert job.printed().count(" skipped: non-finite") == 2, "said once"
    one, other = (torch.load(tmp_path / f"weights{rank}.pt") for rank in range(2))
    assert same_bits(one, other)


# Ranks that fail, die or stall


def before_step(number: int, action: Callable[[], None], rank: int, *, whose: int = 1) -> None:
    """Have a rank do something before it takes this step."""
    step = Trainer._step

    def changed(trainer, *rest):
        if rank == whose and trainer.progress.step + 1 == number:
            action()
        return step(trainer, *rest)

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


def refuse() -> None:
    raise ValueError("--flag value: not so\nand a second line")


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.\nmore of it")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def halt() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep() -> None:
    time.sleep(300)


def last_checkpoint(folder: Path) -> str:
    checkpoints = Checkpoints(folder / "checkpoints", keep_last=5)
    path = checkpoints.latest()
    checkpoints.verify(path)
    return path.name


@pytest.mark.parametrize("mode", ["ddp", "fsdp_full"])
@pytest.mark.parametrize(
    ("action", "message"),
    [
        (fail, "KeyError: 'no such column'"),
        (run_out_of_memory, "CUDA out of memory. Try a smaller --batch_size"),
    ],
)
def test_the_error_of_one_rank_ends_the_job_and_is_told_once_with_its_rank(mode, action, message, tmp_path):
    flags = f"--sharding_mode {mode} --save_interval 1"
    job = start(tmp_path / "run", flags, patch=partial(before_step, 3, action))
    assert job.wait(60) == [EXIT_FAILED, EXIT_FAILED if action is fail else EXIT_OUT_OF_MEMORY]
    (error,) = job.errors()
    assert error.startswith(f"error: rank 1 ({platform.node()}): {message}")
    assert ("Traceback" in job.printed()) == (action is fail)
    assert last_checkpoint(job.folder) == "step_000002"


def with_slow_logs(rank: int) -> None:
    with_slow(Tracker, "finish", "finishing the logs", 300, rank)
    before_step(2, fail, rank, whose=0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_error_is_told_before_the_logs_are_finished_which_ends_the_job_soon(ranks, tmp_path):
    job = start(tmp_path / "run", ranks=ranks, patch=with_slow_logs)
    began = time.monotonic()
    wait_for_words(job, "finishing the logs")
    assert ranks == 1 or "error: rank 0" in job.printed()
    assert job.wait(60) == [EXIT_FAILED] * ranks and time.monotonic() - began < 60
    assert "KeyError: 'no such column'" in job.printed()


@pytest.mark.parametrize("mode", ["ddp", "fsdp_full"])
def test_a_rank_that_is_killed_ends_the_job(mode, tmp_path):
    flags = f"--sharding_mode {mode} --save_interval 1"
    job = start(tmp_path / "run", flags, patch=partial(before_step, 3, die))
    assert job.wait(60) == [EXIT_FAILED, -signal.SIGKILL]
    (error,) = job.errors()
    assert error == (
        f"error: rank 1 ({platform.node()}) is gone: it was killed, or its node is lost. What was saved "
        "before is intact; rerun the command with this run's --output_dir to resume"
    )
    assert last_checkpoint(job.folder) == "step_000002"


def test_of_three_ranks_the_one_that_is_killed_is_named_once(tmp_path):
    job = start(tmp_path / "run", "--batch_size 1", ranks=3, patch=partial(before_step, 3, die))
    assert job.wait(60) == [EXIT_FAILED, -signal.SIGKILL, EXIT_FAILED]
    (error,) = job.errors()
    assert error.startswith(f"error: rank 1 ({platform.node()}) is gone: it was killed")


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (partial(before_step, 3, halt), "is silent, last"),
        (partial(while_loading, 3, sleep), "loading the data of step 3 for"),
    ],
    ids=["stopped", "asleep"],
)
def test_a_rank_that_stalls_ends_the_job_and_is_named(patch, message, tmp_path):
    job = start(tmp_path / "run", "--save_interval 1 --timeout_minutes 0.1", patch=patch)
    job.ranks[0].join(60)
    if patch.args[1] is halt:
        os.kill(job.ranks[1].pid, signal.SIGKILL)  # torchrun does, once a rank has failed
    assert job.wait(20)[0] == EXIT_FAILED
    (error,) = job.errors()
    stalled = f"no progress for 6 s; rank 1 ({platform.node()}) {message}"
    assert error.startswith(f"error: --timeout_minutes 0.1: {stalled}")
    assert last_checkpoint(job.folder) == "step_000002"


def test_the_rank_that_stalls_is_named_whatever_the_others_wrote_in_saves(tmp_path):
    """The first rank writes and checks more files than the others."""
    flags = "--sharding_mode fsdp_full --save_interval 1 --timeout_minutes 0.1"
    job = start(tmp_path / "run", flags, patch=partial(before_step, 4, sleep, whose=0))
    assert EXIT_FAILED in job.wait(60)
    (error,) = job.errors()
    assert f"no progress for 6 s; rank 0 ({platform.node()}) loading the data of step 4" in error
    assert "rank 1" not in error


def without_a_store(rank: int) -> None:
    """For three seconds of the first step, or from then on for rank 1, which also stalls."""
    watchdog.SILENCE_SECONDS = 1.0
    tell, gone = Watchdog._send, []

    def changed(dog):
        if dog._progress:
            gone.append(time.monotonic())
            if rank == 1 or gone[-1] - gone[0] < 3:
                raise dist.DistStoreError("a timeout")
        tell(dog)

    Watchdog._send = changed
    before_step(2, sleep, rank)


def test_a_rank_that_has_lost_the_store_still_ends_a_job_that_stalls(tmp_path):
    job = start(tmp_path / "run", "--timeout_minutes 0.1", patch=without_a_store)
    assert EXIT_FAILED in job.wait(60)
    assert "error: --timeout_minutes 0.1: no progress for 6 s" in job.printed()


def impatient(rank: int) -> None:
    watchdog.SILENCE_SECONDS = 2.0
    before_step(3, halt, rank)


def test_a_rank_that_falls_silent_ends_the_job_long_before_the_timeout(tmp_path):
    job = start(tmp_path / "run", "--save_interval 1", patch=impatient)
    job.ranks[0].join(60)
    os.kill(job.ranks[1].pid, signal.SIGKILL)  # torchrun does, once a rank has failed
    assert job.wait(20)[0] == EXIT_FAILED
    (error,) = job.errors()
    assert error.startswith(f"error: rank 1 ({platform.node()}) is silent, last ")
    assert "it was killed, or its node is gone" in error


def slow_and_impatient(rank: int) -> None:
    watchdog.SILENCE_SECONDS = 2.0
    slow(rank)


def test_a_job_that_is_suspended_and_continued_goes_on(tmp_path):
    """Both ranks come back to clocks that say the other one was silent, and itself without progress."""
    flags = "--max_steps 12 --timeout_minutes 0.05 --no_export"
    job = start(tmp_path / "run", flags, patch=slow_and_impatient)
    wait_for_step(job, 3)
    for number, pause in ((signal.SIGSTOP, 5.0), (signal.SIGCONT, 0.0)):
        for process in job.ranks:
            os.kill(process.pid, number)
        time.sleep(pause)
    assert job.wait() == [0, 0], job.printed()


def with_a_store_that_stutters(rank: int) -> None:
    """Every other request of rank 1's watchdog fails."""
    tell, count = watchdog.Watchdog._send, iter(range(10**6))

    def stutter(self):
        if rank == 1 and next(count) % 2:
            raise dist.DistStoreError("a timeout")
        tell(self)

    watchdog.Watchdog._send, watchdog.SILENCE_SECONDS = stutter, 3.0
    while_loading(4, partial(time.sleep, 6), rank)


def test_a_store_that_answers_late_ends_no_job(tmp_path):
    train(tmp_path / "run", "--max_steps 5 --timeout_minutes 0.2", patch=with_a_store_that_stutters)


def with_late_data(rank: int) -> None:
    if rank == 1:
        load = prepare._load_data
        prepare._load_data = lambda *args, **kwargs: (time.sleep(10), load(*args, **kwargs))[1]


def test_before_the_first_step_a_rank_may_take_longer_than_the_timeout(tmp_path):
    train(tmp_path / "run", "--max_steps 1 --timeout_minutes 0.05", patch=with_late_data)


def with_a_start_that_stalls(method: str, whose: int, rank: int) -> None:
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
def test_a_rank_that_stalls_before_the_first_step_ends_the_job_and_is_named(
    method, whose, doing, limit, tmp_path
):
    patch = partial(with_a_start_that_stalls, method, whose)
    job = start(tmp_path / "run", "--timeout_minutes 0.1", patch=patch)
    assert EXIT_FAILED in job.wait(60)
    (error,) = job.errors()
    stalled = f"no progress for {limit} s; rank {whose} ({platform.node()}) {doing} for"
    assert error.startswith(f"error: --timeout_minutes 0.1: {stalled}")


def test_finishing_the_logs_may_take_longer_than_the_timeout(tmp_path):
    patch = partial(with_slow, Tracker, "finish", "finishing the logs", 10)
    train(tmp_path / "run", "--max_steps 1 --no_export --timeout_minutes 0.05", patch=patch)


def with_another_opinion(rank: int) -> None:
    """Of the sharding mode, as a GPU of another size has."""
    assert callable(choose.memory.choose_mode)
    choose.memory.choose_mode = lambda *_: (("ddp", "fsdp_full")[rank], "so")


def test_the_first_rank_chooses_the_mode_for_all(tmp_path):
    job = train(tmp_path / "run", "--max_steps 1", patch=with_another_opinion)
    assert summary(job.folder)["sharding_mode"] == "ddp"


def late_answers(rank: int) -> None:
    answer = run.answer
    run.answer = lambda *args, **kwargs: (time.sleep(8), answer(*args, **kwargs))[1]


def test_samples_are_answered_when_the_other_ranks_are_gone(tmp_path):
    flags = "--max_steps 1 --generate_samples 1 --timeout_minutes 0.05"
    job = train(tmp_path / "run", flags, patch=late_answers)
    assert "ANSWER" in (job.folder / "samples.txt").read_text()


# Ranks that do not fit together


def with_flags(flags: str, rank: int) -> None:
    if rank == 1:
        parse = run.parse_config
        run.parse_config = lambda argv, **words: parse([*argv, *flags.split()], **words)


def with_other_software(rank: int) -> None:
    if rank == 1:
        found = run.software() | {"torch": "1.0"}
        run.software = lambda: found


def in_a_folder_of_its_own(folder: Path, rank: int) -> None:
    os.chdir(folder / str(rank))


def with_another_recipe(rank: int) -> None:
    """As where one node's GPUs or libraries cannot run what the others can."""
    if rank == 1:
        original = resolve.precision.resolve_precision
        resolve.precision.resolve_precision = lambda cfg: replace(original(cfg), effective="bf16")


def with_another_model(folder: Path, rank: int) -> None:
    if rank == 1:
        plan = resolve.te_models.plan_model
        resolve.te_models.plan_model = lambda *args, **words: replace(plan(*args, **words), weights=folder)


def with_fewer_samples_to_evaluate(rank: int) -> None:
    if rank == 1:
        sample = Split.sample
        Split.sample = lambda split, count: sample(split, count - 12)


def with_timeouts_looked_at(rank: int) -> None:
    fit = Trainer.fit

    def changed(trainer):
        waits = {g._get_backend(torch.device("cpu")).options._timeout for g in c10d._world.pg_map}
        assert len(c10d._world.pg_map) > 1 and waits == {PATIENCE}
        return fit(trainer)

    Trainer.fit = changed


def refused(job: Job) -> str:
    """The one line that ends a job which cannot start."""
    assert job.wait(60) == [EXIT_BAD_SETTING] * len(job.ranks), job.printed()
    assert "Traceback" not in job.printed()
    (error,) = job.errors()
    return error


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (partial(with_flags, "--seed 7"), r"the settings differ on rank 1 \(.*\): seed 7 \(rank 0: 42\)"),
        (with_other_software, r"the software differ on rank 1 \(.*\): torch 1.0 \(rank 0: "),
        (with_another_recipe, r"what can run differ on rank 1 \(.*\): recipe bf16 \(rank 0: "),
    ],
)
def test_ranks_with_other_settings_software_or_recipes_are_refused(patch, message, tmp_path):
    error = refused(start(tmp_path / "run", patch=patch))
    assert re.search(message, error) and not (tmp_path / "run").exists()


def rows(number: int) -> str:
    return "".join(
        json.dumps({"text": f"{i} is the number after {i - 1}. " * 5}) + "\n" for i in range(number)
    )


def test_ranks_that_see_other_data_or_another_folder_are_refused(tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "rows.jsonl").write_text(rows(40 + rank))
    patch = partial(in_a_folder_of_its_own, tmp_path)
    data = start(tmp_path / "run", "--dataset_name rows.jsonl --split_name train", patch=patch)
    folder = start(tmp_path / "other", "--output_dir here", patch=patch)
    assert re.search(r"the data differ on rank 1 \(.*\): samples ", refused(data))
    assert re.search(r"--output_dir here: on .* it is not the first rank's", refused(folder))


def test_ranks_with_other_deepspeed_files_of_one_name_are_refused(tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        settings = {"zero_optimization": {"stage": 1 + rank}}
        (tmp_path / str(rank) / "mine.json").write_text(json.dumps(settings))
    flags = "--sharding_mode deepspeed --deepspeed_config mine.json"
    error = refused(start(tmp_path / "run", flags, patch=partial(in_a_folder_of_its_own, tmp_path)))
    assert re.search(r"the settings of --deepspeed_config mine.json differ on rank 1 \(.*\): zero_opt", error)


def with_small_windows(folder: Path, rank: int) -> None:
    order.WINDOW = 20
    in_a_folder_of_its_own(folder, rank)


def test_a_stream_that_becomes_another_on_a_rank_ends_the_job(tmp_path):
    """The start compares what was read by then."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        later = [f"{i} " * 100 * rank + "the end" for i in range(40)]
        text = rows(30) + "".join(json.dumps({"text": line}) + "\n" for line in later)
        (tmp_path / str(rank) / "rows.jsonl").write_text(text)
    flags = "--dataset_name rows.jsonl --split_name train --streaming --eval_samples 0 --max_steps 40"
    error = refused(start(tmp_path / "run", flags, patch=partial(with_small_windows, tmp_path)))
    assert re.search(r"places in the stream differ on rank 1 \(.*\): row and sequence \[", error)


def test_a_folder_of_the_same_name_on_each_node_is_not_a_shared_one(tmp_path):
    for rank in range(2):
        (tmp_path / str(rank) / "here").mkdir(parents=True)
    job = start(tmp_path / "run", "--output_dir here", patch=partial(in_a_folder_of_its_own, tmp_path))
    assert re.search(r"--output_dir here: on .* it is not the first rank's", refused(job))


def test_ranks_that_would_evaluate_other_samples_are_refused(tmp_path):
    """Some would wait in a collective of an evaluation that the others have left."""
    flags = "--dataset_name demo --eval_split test --eval_samples 16 --no_packing --eval_batch_size 1"
    error = refused(start(tmp_path / "run", flags, patch=with_fewer_samples_to_evaluate))
    assert re.search(r"the data differ on rank 1 \(.*\): evaluation ", error)


def test_ranks_with_other_weights_of_one_model_are_refused(sharded, tmp_path):
    """Each rank reads its shards from its own disk: a model of two revisions would train."""
    own, changed = sharded["fp32"] / "export", tmp_path / "changed"
    shutil.copytree(own, changed)
    name = changed / "model.safetensors"
    save_file({key: tensor + 1 for key, tensor in load_file(name).items()}, name, metadata={"format": "pt"})
    flags = f"--model_name {own} --tokenizer_name demo --sharding_mode fsdp_full"
    error = refused(start(tmp_path / "run", flags, patch=partial(with_another_model, changed)))
    assert re.search(r"the model's files differ on rank 1 \(.*\): weights ", error)


def test_fp8_weights_that_the_ranks_cannot_share_evenly_are_refused(tmp_path):
    flags = "--mixed_precision fp8 --sharding_mode fsdp_full --fp8_all_gather"
    job = start(tmp_path / "run", flags, ranks=3)
    assert set(job.wait()) == {EXIT_BAD_SETTING}
    (error,) = job.errors()
    assert "--fp8_all_gather: 3 ranks cannot share the 256 rows of self_attn.q_proj.weight" in error


def with_a_library_s_error(rank: int) -> None:
    if rank == 1:
        run.build_loaders = lambda *args, **words: json.loads("{")  # a ValueError


def test_a_library_s_error_on_one_rank_is_none_of_a_setting(tmp_path):
    """Whichever rank tells of it: the code is 1, and the traceback is that of the rank that failed."""
    job = start(tmp_path / "run", patch=with_a_library_s_error)
    assert job.wait(60) == [EXIT_FAILED] * 2
    (error,) = job.errors()
    assert re.match(r"error: rank 1 \(.*\): JSONDecodeError: ", error)
    assert job.printed().count("Traceback") == 1 and "raw_decode" in job.printed()


@pytest.mark.parametrize("flags", ["--sharding_mode hsdp --hsdp_shard_size 1", "--sharding_mode ds_zero2"])
def test_every_process_group_waits_as_long_as_the_watchdog(flags, tmp_path):
    train(tmp_path / "run", f"{flags} --max_steps 1 --no_export", patch=with_timeouts_looked_at)


@pytest.mark.parametrize(("local", "told"), [("0", True), ("1", False)])
def test_a_bad_setting_is_told_before_torchrun_ends_the_rank_that_tells(local, told, monkeypatch, capsys):
    waited = []
    monkeypatch.setattr(outcome.time, "sleep", waited.append)
    monkeypatch.setenv("LOCAL_RANK", local)
    monkeypatch.setenv("RANK", local)
    with pytest.raises(UserError) as caught:
        config_from_dict({"batch_size": 0})
    assert outcome.end(caught.value, None) == EXIT_BAD_SETTING
    assert ("--batch_size 0" in capsys.readouterr().err) == told
    assert waited == ([] if told else [outcome.ERROR_REPORT_DELAY_SECONDS])


def with_too_few_gpus(rank: int) -> None:
    if rank == 1:
        os.environ["LOCAL_RANK"] = "0"  # the first of another node
        torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 1)


def test_a_node_with_fewer_gpus_than_ranks_says_so(tmp_path):
    """Whichever node that is: the others only wait for it, and are told."""
    job = start(tmp_path / "run", patch=with_too_few_gpus)
    assert job.wait(60) == [EXIT_BAD_SETTING, EXIT_BAD_SETTING]
    here = f"--nproc_per_node 2: {platform.node()} has 1 GPUs; start one rank per GPU"
    assert job.errors() == [f"error: rank 1 ({platform.node()}): {here}", f"error: {here}"]


def with_a_broken_driver(rank: int) -> None:
    if rank == 1:
        torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 2)


def test_a_rank_that_a_library_stops_before_the_others_met_is_named_at_once(tmp_path):
    """torch has no GPU to set here."""
    job = start(tmp_path / "run", patch=with_a_broken_driver)
    assert job.wait(60)[0] == EXIT_FAILED  # not once it has waited for --timeout_minutes
    errors = [line for line in job.printed().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and f"rank 1 ({platform.node()}): " in errors[0]


@pytest.mark.parametrize("streamed", ["", "--streaming --max_steps 3"])
def test_more_ranks_than_sequences_are_refused(tmp_path, streamed):
    error = refused(start(tmp_path / "run", f"--num_of_samples 10 --batch_size 4 {streamed}", ranks=3))
    assert (
        "--batch_size 4: on 3 ranks a micro-batch needs 12 sequences, but --split_name train_1M has" in error
    )


def test_shards_that_do_not_divide_the_ranks_are_refused(tmp_path):
    error = refused(start(tmp_path / "run", "--sharding_mode hsdp --hsdp_shard_size 2", ranks=3))
    assert "--hsdp_shard_size 2: does not divide the 3 ranks" in error


# What is written, and by whom


def test_only_the_first_rank_logs(sharded):
    folder = sharded["fp32"]
    steps = [line["step"] for line in lines(folder) if "train/loss" in line]
    assert steps == list(range(1, 11))
    assert len(list(folder.rglob("offline-run-*"))) == 1
    assert [path.name for path in folder.parent.iterdir() if (path / "config.json").exists()] == list(sharded)
    found = summary(folder)
    assert (found["world_size"], found["nodes"], found["gpus"]) == (2, 1, 0)
    environment = json.loads((folder / "env.json").read_text())
    assert (environment["world_size"], environment["hosts"]) == (2, [platform.node()])


def test_a_finished_run_on_two_ranks_started_again_changes_nothing(sharded):
    before = (sharded["fp32"] / "summary.json").read_text(), exported(sharded["fp32"])
    job = train(sharded["fp32"], "--sharding_mode fsdp_full --save_interval 3")
    assert "this run is finished" in job.printed()
    assert (job.folder / "summary.json").read_text() == before[0]
    assert same_bits(exported(job.folder), before[1])


@pytest.mark.parametrize(
    ("script", "variable", "way_out"),
    [
        ("train_fp8.py", "WORLD_SIZE", "use torchrun --nproc_per_node=N train_multi_gpu.py"),
        ("train_multi_gpu.py", "WORLD_SIZE", "needs RANK, WORLD_SIZE, LOCAL_RANK, .* use torchrun"),
        ("train_multi_gpu.py", "SLURM_STEP_NUM_TASKS", "under Slurm"),
    ],
)
def test_several_processes_without_a_job_are_refused(script, variable, way_out, tmp_path):
    """Each would train the same run once more."""
    job = subprocess.run(
        [sys.executable, script, *shlex.split(SMALL), "--output_dir", str(tmp_path / "run")],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", variable: "2"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert job.returncode == EXIT_BAD_SETTING and not (tmp_path / "run").exists()
    assert re.fullmatch(f"error: {variable}=2: {script} .*{way_out}.*\n", job.stderr), job.stderr


def test_ranks_that_do_not_come_are_named():
    store = dist.HashStore()
    with pytest.raises(TimeoutError, match=r"^ranks 1, 2 of 3$"):
        agree_on_start(store, 0, 3, timedelta(seconds=0.1))


def test_without_torchrun_a_run_is_on_one_device_and_says_so(tmp_path):
    flags = "--sharding_mode fsdp_full --max_steps 1 --no_export --no_save_checkpoints"
    job = train(tmp_path / "run", flags, ranks=1)
    assert "not started by torchrun: running on one device" in job.printed()
    assert "--sharding_mode fsdp_full: one device, nothing to shard" in job.printed()
    assert summary(job.folder)["sharding_mode"] == "single"


# Under torchrun itself


class Torchrun:
    """A torchrun command and its ranks."""

    def __init__(self, folder: Path, flags: str, options: str = "--standalone --nproc_per_node=2"):
        command = [sys.executable, "-m", "torch.distributed.run", *shlex.split(options), "train_multi_gpu.py"]
        self.folder = folder
        self.agent = subprocess.Popen(
            [*command, *shlex.split(SMALL), "--output_dir", str(folder), *shlex.split(flags)],
            cwd=ROOT,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def pid(self, rank: int) -> int:
        """Of one of its ranks, each a process group of its own."""
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                environment = (path / "environ").read_bytes().split(b"\0")
                if parent == self.agent.pid and f"RANK={rank}".encode() in environment:
                    return int(path.name)
        raise AssertionError(f"no rank {rank}")

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self.agent.poll() is None:
            if (self.folder / "metrics.jsonl").exists() and max(losses(self.folder), default=0) >= step:
                return
            time.sleep(0.02)
        raise AssertionError(self.end())

    def end(self) -> str:
        """What it printed; a job that hangs is ended by its torchrun, which ends its ranks."""
        try:
            return self.agent.communicate(timeout=120)[0]
        except subprocess.TimeoutExpired:
            self.agent.terminate()
            raise AssertionError(self.agent.communicate(timeout=60)[0]) from None


def test_a_bad_setting_is_told_once_under_torchrun(tmp_path):
    job = Torchrun(tmp_path / "run", "--model_name /nowhere")
    output = job.end()
    assert job.agent.returncode != 0
    assert len(re.findall(r"^error: .*--model_name /nowhere", output, re.M)) == 1


def test_a_killed_rank_is_started_again_by_torchrun_and_a_stopped_job_by_the_same_command(sharded, tmp_path):
    """With --max_restarts all ranks start again and go on; SIGTERM to one of them saves and ends the job."""
    folder, flags = tmp_path / "run", "--sharding_mode fsdp_full --save_interval 3"
    job = Torchrun(folder, flags, "--standalone --nproc_per_node=2 --max_restarts=1")
    job.wait_for_step(4)  # so that step 3 is saved
    os.kill(job.pid(1), signal.SIGKILL)
    deadline = time.monotonic() + 120
    while not (folder / "metrics.discarded.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    job.wait_for_step(4)
    os.kill(job.pid(1), signal.SIGTERM)
    output = job.end()
    assert job.agent.returncode == 1, output
    for part in ("resumed from", "stopped by a signal", f"exitcode: {EXIT_INTERRUPTED}"):
        assert part in re.sub(" +:", ":", output), output
    assert not (folder / "summary.json").exists()
    train(folder, flags)
    assert losses(folder) == losses(sharded["fp32"])
    assert same_bits(exported(folder), exported(sharded["fp32"]))


def test_a_rank_ends_with_its_exit_handlers_but_without_tearing_python_down():
    """Threads that outlive their process group abort a process that is torn down."""
    ends = """
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
    job = subprocess.run([sys.executable, "-c", ends], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (job.returncode, job.stdout) == (75, "not flushed, exit handler\n"), job.stderr


def two_nodes() -> tuple[str, int]:
    """torchrun's options for one of two agents on this machine, and the port of the one that comes first."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = f"--rdzv_backend=c10d --rdzv_endpoint=localhost:{port}"
    return f"--nnodes=2 --nproc_per_node=1 {where}", port


def test_a_node_whose_ranks_cannot_start_ends_the_others(tmp_path):
    """They would wait for it as long as for progress."""
    options, port = two_nodes()
    began = time.monotonic()
    waiting = Torchrun(tmp_path / "run", "", options)
    while time.monotonic() - began < 30:  # until it has the job's store, which ends with its host
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port)):
            break
        time.sleep(0.1)
    wrong = Torchrun(tmp_path / "run", "--config only_there.yaml", options)
    outputs = [wrong.end(), waiting.end()]
    assert time.monotonic() - began < 90 and wrong.agent.returncode == waiting.agent.returncode == 1
    assert re.search(r"^error: --config only_there.yaml: ", outputs[0], re.M), outputs[0]
    assert re.search(r"^error: rank . \(.*\): --config only_there.yaml: ", outputs[1], re.M), outputs[1]


def test_two_nodes_train_together(reference, tmp_path):
    options, _ = two_nodes()
    nodes = [Torchrun(tmp_path / "run", "--sharding_mode fsdp_full", options) for _ in range(2)]
    outputs = [node.end() for node in nodes]
    assert [node.agent.returncode for node in nodes] == [0, 0], outputs
    assert sum("on 2 x cpu on 2 nodes, fsdp_full" in output for output in outputs) == 1
    same_run(tmp_path / "run", reference("--gradient_accumulation_steps 1"))
    found = summary(tmp_path / "run")
    assert found["nodes"] == found["world_size"] == 2
    assert found["node_hours"] == pytest.approx(2 * found["runtime_seconds"] / 3600)
