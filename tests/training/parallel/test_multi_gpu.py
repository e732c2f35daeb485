"""Whole runs on several ranks, over gloo on the CPU: the same run as on one device, resume, and signals."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fp8_suite.core import signals
from fp8_suite.core.errors import EXIT_INTERRUPTED
from fp8_suite.core.packages import ROOT
from fp8_suite.te_models.hugging_face import HFCausalLM
from fp8_suite.training import resolve, run
from fp8_suite.training.checkpoint import progress
from fp8_suite.training.checkpoint import settings as save_settings
from fp8_suite.training.checkpoint.index import step_folders
from fp8_suite.training.optim import moments, offload
from fp8_suite.training.parallel.ranks import COLLECTIVE_TIMEOUT
from fp8_suite.training.tracking.tracker import Tracker
from fp8_suite.training.trainer import Trainer
from safetensors.torch import load_file, save_file
from torch.distributed import distributed_c10d as c10d
from torch.distributed import run as distributed_run

from tests.children import forked, preload
from tests.hugging_face_models import save_model_with_images
from tests.training.parallel import jobs
from tests.training.parallel.jobs import (
    HERE,
    SMALL,
    Job,
    checkpoint,
    curve,
    delay,
    exported,
    redirect,
    refused,
    rest,
    same_bits,
    saved,
    start,
    summary,
    train,
    wait_until,
)

preload(__name__)


# The same run on any number of ranks, in any mode


def same_run(
    first: Path, second: Path, *, rel: float = 1e-5, norms: float = 1e-4, skipped: tuple[int, ...] = ()
) -> None:
    """Compare losses, gradient norms, evaluation, counts and weights; `skipped` steps are not finite."""
    runs = first, second
    # A CPU sums the squares of half a million FP32 numbers with an error of its own.
    for name, tolerance in {"train/loss": rel, "train/grad_norm": max(rel, norms), "eval/loss": rel}.items():
        a, b = ({k: v for k, v in curve(f, name).items() if k not in skipped} for f in runs)
        assert a == pytest.approx(b, rel=tolerance) and a, name
    a, b = map(summary, runs)
    for name in ("steps", "tokens", "label_tokens", "eval_label_tokens", "skipped_steps"):
        assert a[name] == b[name], name
    a, b = map(exported, runs)
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        torch.testing.assert_close(b[name], tensor, rtol=2**-7, atol=10 * rel)  # a rounding of BF16


@pytest.fixture(scope="module")
def model(small) -> str:
    return small(num_hidden_layers=2)


@pytest.fixture(scope="module")
def reference(once) -> Callable[[str], Path]:
    """An epoch on one device, with the global batch of two ranks, once for each set of flags."""
    return lambda flags: once(f"--batch_size 4 {flags}")


def resume_in_layouts(folder: Path, flags: str, layouts: dict[str, tuple], rel: float) -> None:
    """Resume an origin at step 2 in each layout, on its ranks; in the "same" layout bit for bit."""
    for name, (origin, layout, ranks) in layouts.items():
        again = f"{flags} {layout} --resume {checkpoint(origin, 2)} --save_interval 2"
        resumed = train(folder / name, again, ranks=ranks).folder
        if name == "same":
            assert curve(resumed) == rest(origin, 2) and same_bits(saved(resumed, 4), saved(origin, 4))
        assert curve(resumed) == pytest.approx(rest(origin, 2), rel=rel), name
        assert summary(resumed)["tokens"] == summary(origin)["tokens"]


SHARDED = "--sharding_mode fsdp_full --save_interval 3"


@pytest.fixture(scope="module")
def sharded(model, tmp_path_factory) -> dict[str, Path]:
    """An epoch on two ranks under FSDP with checkpoints, by precision; one is logged to W&B too."""
    folder = tmp_path_factory.mktemp("sharded")
    settings = {"fp32": "--use_wandb", "bf16": "--mixed_precision bf16"}
    return {
        name: train(folder / name, f"{SHARDED} {model} {flags}").folder for name, flags in settings.items()
    }


RAMP = "--batch_ramp '256:0 512:1Ki 1Ki:2Ki' --lr_scheduler wsd --save_interval 4 --no_export"


@pytest.fixture(scope="module")
def ramp(model, tmp_path_factory) -> Path:
    """An epoch on one rank, with 1, 2 and 4 micro-batches per step."""
    return train(tmp_path_factory.mktemp("ramp") / "one", f"{RAMP} {model}", ranks=1).folder


def check_group_timeouts(rank: int) -> None:
    """Check that every process group, also a library's, has the suite's timeout."""
    train_all = Trainer.train

    def checked(trainer):
        timeouts = {g._get_backend(torch.device("cpu")).options._timeout for g in c10d._world.pg_map}
        assert timeouts == {COLLECTIVE_TIMEOUT}
        return train_all(trainer)

    Trainer.train = checked


@pytest.mark.parametrize(
    ("mode", "accumulation", "more"),
    [
        ("ddp", 2, {}),
        ("fsdp_grad", 2, {}),
        ("hsdp", 1, {"ranks": 4, "nodes": 2}),  # each node has a copy of the model, over its two ranks
    ],
)
def test_the_sharding_mode_does_not_change_the_run(mode, accumulation, more, model, reference, tmp_path):
    """Labels are masked unevenly: a mean of the ranks' means would show."""
    flags = f"{model} --gradient_accumulation_steps {accumulation}"
    sharding = f"--sharding_mode {mode}" + " --batch_size 1" * (mode == "hsdp")
    job = train(tmp_path / "run", f"{flags} {sharding}", patch=check_group_timeouts, **more)
    same_run(job.folder, reference(flags))
    totals = summary(job.folder)
    assert totals["sharding_mode"] == mode and totals["nodes"] == more.get("nodes", 1)
    assert totals["node_hours"] == pytest.approx(totals["nodes"] * totals["runtime_seconds"] / 3600)


@pytest.mark.parametrize(("precision", "rel", "norms"), [("fp32", 1e-5, 1e-4), ("bf16", 2e-3, 4e-3)])
def test_fsdp_with_checkpoints_is_the_same_run(precision, rel, norms, model, sharded, reference):
    """On a CPU, BF16 rounds at other places with autocast than with FSDP; norms come to differ by 0.2 %."""
    flags = {"fp32": "--gradient_accumulation_steps 1", "bf16": "--mixed_precision bf16"}[precision]
    same_run(sharded[precision], reference(f"{model} {flags}"), rel=rel, norms=norms)


@pytest.mark.parametrize("mode", ["ddp", "fsdp_full"])
def test_parameters_without_gradients_keep_their_values(reference, mode, tmp_path):
    save_model_with_images(tmp_path / "model")
    flags = f"--model_name {tmp_path / 'model'} --tokenizer_name demo --no_packing --max_steps 2"
    flags += " --weight_decay 0.5 --gradient_accumulation_steps 2"
    train(tmp_path / "run", f"{flags} --sharding_mode {mode}")
    assert curve(tmp_path / "run") == pytest.approx(curve(reference(f"{flags} --no_export")), rel=1e-4)
    before, after = (load_file(tmp_path / at / "model.safetensors") for at in ("model", "run/export"))
    assert before.keys() == after.keys()
    still = {name for name, tensor in before.items() if torch.equal(tensor.bfloat16(), after[name])}
    assert still == {name for name in before if "vision" in name or "projector" in name}


# Resume


def resume(folder: Path, origin: Path, step: int, flags: str = "", *, ranks: int = 2) -> Path:
    flags = f"--resume {checkpoint(origin, step)} --save_interval 3 {flags}"
    return train(folder, flags, ranks=ranks).folder


def test_a_run_resumes_on_one_rank_and_in_another_mode(model, sharded, tmp_path):
    uninterrupted = sharded["fp32"]
    one = resume(tmp_path / "one", uninterrupted, 3, f"{model} --batch_size 4", ranks=1)
    split = f"{model} --batch_size 1 --gradient_accumulation_steps 2"
    two = resume(tmp_path / "two", one, 6, f"{split} --sharding_mode ddp")
    for folder, step, ranks in ((one, 3, 1), (two, 6, 2)):
        assert curve(folder) == pytest.approx(rest(uninterrupted, step), rel=1e-6)
        assert summary(folder)["label_tokens"] == summary(uninterrupted)["label_tokens"]
        assert summary(folder)["world_size"] == ranks


def test_moments_in_8_bits_are_sharded_and_resharded(model, tmp_path):
    """Resume at the end, without further steps. Blocks of a row stay together; three ranks shard unevenly."""
    flags = f"{model} --moment_dtype fp8 --save_interval 3"
    three_ranks = train(tmp_path / "run", f"--max_steps 3 --sharding_mode fsdp_full {flags}", ranks=3).folder
    expected = saved(three_ranks, 3)
    assert any(name.endswith("exp_avg_exponents") for name in expected)
    for ranks, mode in ((1, ""), (2, "--sharding_mode fsdp_grad")):
        settings = f"--max_steps 3 --no_export {flags} --batch_size {6 // ranks} {mode}"
        folder = resume(tmp_path / str(ranks), three_ranks, 3, settings, ranks=ranks)
        assert same_bits(saved(folder, 3), expected), (ranks, mode)
    settings = (
        f"{flags} --max_steps 3 --no_export --batch_size 3 --sharding_mode ds_zero2 --moment_dtype fp32"
    )
    converted = saved(resume(tmp_path / "zero", three_ranks, 3, settings), 3)
    for name in (name for name in expected if name.endswith("exp_avg_exponents")):
        codes = expected[name.removesuffix("_exponents")]
        values = moments.decode(codes, expected[name], signed=True)
        assert torch.equal(converted[name.removesuffix("_exponents")], values)


def clock_by_step(rank: int) -> None:
    """Rank 1's clock moves by an hour at every step, the other's stands still."""
    before_step, now = Trainer._before_step, [0.0]

    def advance(made, micro_batches):
        before_step(made, micro_batches)
        now[0] += 3600 * rank

    Trainer._before_step = advance
    save_settings.time = SimpleNamespace(perf_counter=lambda: now[0])


def test_ranks_with_different_clocks_save_by_time_at_the_same_steps(model, tmp_path):
    flags = f"{model} --max_steps 5 --sharding_mode fsdp_full --no_export --save_interval"
    folder = train(tmp_path / "run", f"{flags} 2h", patch=clock_by_step).folder
    assert set(step_folders(folder / "checkpoints")) == {2, 4, 5}
    assert json.loads((folder / "settings.json").read_text())["save_interval"] == "2h"
    resumed = resume(tmp_path / "resumed", folder, 2, f"{flags} 0.0001m")  # less than a step, by a real clock
    assert set(step_folders(resumed / "checkpoints")) >= {4, 5}
    assert all(same_bits(saved(resumed, step), saved(folder, step)) for step in (4, 5))


def small_chunks(rank: int) -> None:
    offload.CHUNK = 100 * moments.BLOCK


def test_an_offloaded_optimizer_changes_no_bits_and_may_change_at_a_resume(model, tmp_path):
    flags = f"{model} --max_steps 4 --no_export --moment_dtype fp8,bf16 --sharding_mode fsdp_full"
    plain = train(tmp_path / "plain", f"{flags} --save_interval 3").folder
    flags_on = f"{flags} --offload_optimizer"
    job = train(tmp_path / "offloaded", f"{flags_on} --save_interval 3", patch=small_chunks)
    assert "FP8 and BF16 moments, offloaded" in job.printed()
    assert curve(job.folder) == curve(plain)
    for step in (3, 4):
        assert same_bits(saved(job.folder, step), saved(plain, step)), step
    on, off = (
        saved(resume(tmp_path / f"converted{i}", plain, 3, f"{settings} --moment_dtype fp16"), 4)
        for i, settings in enumerate((flags_on, flags))
    )
    assert same_bits(on, off) and any(tensor.dtype == torch.int16 for tensor in on.values())


def test_more_ranks_with_the_same_batch_size_see_every_sample_once(model, sharded, tmp_path):
    """The global batch changes, with a warning; the data resumes at the next unseen sample."""
    flags = f"{model} --resume {checkpoint(sharded['fp32'], 3)} --no_export --save_interval 1"
    job = train(tmp_path / "run", flags, ranks=3)
    warning = "saved on 2 ranks with a global batch of 4 sequences; it is 6 on 3"
    assert job.printed().count(warning) == 1
    two_ranks, three_ranks = summary(sharded["fp32"]), summary(job.folder)
    assert all(three_ranks[name] == two_ranks[name] for name in ("tokens", "label_tokens"))
    assert three_ranks["steps"] == 3 + -(-(37 - 3 * 4) // 6)
    # Resumed once more, on as many ranks, the run keeps the length it was given.
    last = three_ranks["steps"] - 3
    again = resume(tmp_path / "again", job.folder, last, f"{model} --no_export", ranks=3)
    # Sums of three gradients round by their place in DDP's buckets, arranged anew after a first step.
    assert curve(again) == pytest.approx(rest(job.folder, last), rel=1e-6)
    assert summary(again)["tokens"] == three_ranks["tokens"]


def test_a_global_batch_is_kept_on_other_ranks_and_accumulation_follows(model, tmp_path):
    flags = f"{model} --batch_size 2 --global_batch_size 12 --save_interval 2 --no_export"
    job = train(tmp_path / "run", flags)
    assert job.printed().count("fit: --batch_size 2 x 3 micro-batches") == 1
    settings = json.loads((job.folder / "settings.json").read_text())
    sizes = "batch_size", "gradient_accumulation_steps", "global_batch_size"
    assert [settings[name] for name in sizes] == [2, 3, 12]
    three = resume(tmp_path / "three", job.folder, 2, flags, ranks=3)
    assert curve(three) == pytest.approx(rest(job.folder, 2), rel=1e-5)
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(settings | {"output_dir": None}))
    one = resume(tmp_path / "one", job.folder, 2, f"--config {file} --batch_size auto", ranks=1)
    assert curve(one) == pytest.approx(rest(job.folder, 2), rel=1e-5)
    settings = json.loads((one / "settings.json").read_text())
    assert [settings[name] for name in sizes] == [6, 2, 12]


@pytest.mark.parametrize("mode", ["fsdp_full", "ds_zero2"])
def test_a_batch_grows_on_two_ranks_as_on_one_and_tokens_seen_survive_a_change_of_ranks(
    mode, model, ramp, tmp_path
):
    flags = f"{RAMP} {model} --batch_size 1"
    two = train(tmp_path / "two", f"{flags} --sharding_mode {mode}").folder
    one = resume(tmp_path / "one", two, 4, flags, ranks=1)
    assert curve(two) == pytest.approx(curve(ramp), rel=1e-5) and curve(one) == pytest.approx(
        rest(two, 4), rel=1e-5
    )
    for folder, ranks in ((two, 2), (one, 1)):
        for name in ("train/learning_rate", "train/tokens_seen"):
            wanted = {step: value for step, value in curve(ramp, name).items() if step in curve(folder)}
            assert curve(folder, name) == wanted, (name, ranks)


# Signals


def hold_after_step_4(gate: Path, rank: int) -> None:
    """Hold each start of a job at step 4, until the gate with the number of its restarts exists."""
    step = Trainer._before_step

    def held(trainer, *args):
        gate_of_start = gate.with_suffix("." + os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        while trainer.progress.step >= 4 and not gate_of_start.exists():
            time.sleep(0.02)
        return step(trainer, *args)

    Trainer._before_step = held


def slow_end(rank: int) -> None:
    signals.SAME_SIGNAL_SECONDS = jobs.LIMIT
    delay(run, "export", 2, message="exporting now")
    delay(Tracker, "finish", 2, message="finishing the logs")


def test_signals_after_training_and_while_a_stopped_run_ends_change_nothing(tmp_path):
    """Once all is saved, the run finishes, with export and summary."""
    done = start(tmp_path / "done", "--max_steps 1", patch=slow_end)
    stopped = start(tmp_path / "stopped", "--max_steps 400 --no_export", patch=slow_end)
    done.wait_for("exporting now")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(done.ranks[-1].pid, number)
    stopped.wait_for_step(1)
    os.kill(stopped.ranks[-1].pid, signal.SIGTERM)
    stopped.wait_for("finishing the logs")
    os.kill(stopped.ranks[-1].pid, signal.SIGTERM)
    assert done.wait() == [0, 0], done.printed()
    assert summary(done.folder)["steps"] == 1 and exported(done.folder)
    assert stopped.wait() == [EXIT_INTERRUPTED] * 2, stopped.printed()


# Steps that are not finite on one rank


def spoil_two_steps(folder: Path, spoiled: int, rank: int) -> None:
    """On one rank, make the loss of step 2 NaN and the gradient of step 4 infinite; save the last weights."""
    before, after, results = Trainer._before_step, Trainer._after_step, Trainer.results
    forward = HFCausalLM.forward
    number = 0  # of the step that is computed now; evaluations have none

    def count(trainer, *args):
        nonlocal number
        before(trainer, *args)
        number = trainer.progress.step + 1

    def count_no_more(trainer, *args):
        nonlocal number
        number = 0
        return after(trainer, *args)

    def spoil(model, *args, **inputs):
        out = forward(model, *args, **inputs)
        if rank == spoiled and number == 2:
            return out._replace(loss=out.loss * float("nan"))
        if rank == spoiled and number == 4:
            out.loss.register_hook(lambda gradient: gradient * float("inf"))
        return out

    def save_weights(trainer):
        model = getattr(trainer.stack.wrapped, "module", trainer.stack.wrapped)
        weights = {name: getattr(p, "full_tensor", p.detach)() for name, p in model.named_parameters()}
        torch.save(weights, folder / f"weights{rank}.pt")
        return results(trainer)

    Trainer._before_step, Trainer._after_step, Trainer.results = count, count_no_more, save_weights
    HFCausalLM.forward = spoil


@pytest.mark.parametrize(("precision", "rel"), [("fp32", 1e-5), ("fp16", 1e-3)])
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all(precision, rel, model, tmp_path):
    """In FP16 the infinite gradient of step 4 halves the loss scale, the loss of step 2 does not."""
    flags = f"{model} --max_steps 6 --save_interval 0 --eval_interval 0 --mixed_precision {precision}"
    accumulation = " --batch_size 1 --gradient_accumulation_steps 2" * (precision == "fp16")
    one = train(
        tmp_path / "one", f"{flags} --batch_size 4", ranks=1, patch=partial(spoil_two_steps, tmp_path, 0)
    )
    for mode in ("ddp", "fsdp_full"):
        patch = partial(spoil_two_steps, tmp_path, 1)
        folder = train(tmp_path / mode, f"{flags} --sharding_mode {mode}{accumulation}", patch=patch).folder
        same_run(folder, one.folder, rel=rel, skipped=(2, 4))
        assert summary(folder)["skipped_steps"] == 2
        if precision == "fp16":
            assert summary(folder)["overflow_steps"] == 1
            assert list(curve(folder, "train/loss_scale").values()) == [2**16] * 4 + [2**15] * 2
        assert json.loads((checkpoint(folder, 6) / "meta.json").read_text())["optimizer_steps"] == 4
        first, second = (torch.load(tmp_path / f"weights{rank}.pt") for rank in range(2))
        assert same_bits(first, second)


def other_model(folder: Path, rank: int) -> None:
    if rank == 1:
        find_model = resolve.find_model
        resolve.find_model = lambda *args, **kw: replace(find_model(*args, **kw), weights=folder)


def test_ranks_with_different_weights_of_one_model_are_refused(sharded, tmp_path):
    """Each rank reads its shards from its own disk: a model of two revisions would train."""
    model, changed = sharded["fp32"] / "export", tmp_path / "changed"
    shutil.copytree(model, changed)
    name = changed / "model.safetensors"
    save_file({key: tensor + 1 for key, tensor in load_file(name).items()}, name, metadata={"format": "pt"})
    flags = f"--model_name {model} --tokenizer_name demo --sharding_mode fsdp_full"
    error = refused(start(tmp_path / "run", flags, patch=partial(other_model, changed)))
    assert re.search(r"the model's files differ on rank 1 \(.*\): weights ", error)


def test_without_torchrun_a_run_is_on_one_device_with_a_warning(tmp_path):
    flags = "--sharding_mode fsdp_full --max_steps 1 --no_export --no_save_checkpoints"
    job = train(tmp_path / "run", flags, ranks=1)
    assert "not started by torchrun: running on one device" in job.printed()
    assert "--sharding_mode fsdp_full ignored: one device, nothing to shard" in job.printed()
    assert summary(job.folder)["sharding_mode"] == "single"


# Files


def test_only_the_first_rank_logs_and_a_finished_run_stays_unchanged(model, sharded):
    folder = sharded["fp32"]
    assert list(curve(folder)) == list(range(1, 11))
    assert len(list(folder.rglob("offline-run-*"))) == 1
    assert {p.name for p in folder.parent.iterdir() if (p / "settings.json").exists()} == set(sharded)
    totals, environment = summary(folder), json.loads((folder / "env.json").read_text())
    assert (totals["world_size"], totals["nodes"], totals["gpus"]) == (2, 1, 0)
    assert (environment["world_size"], environment["hosts"]) == (2, [HERE])
    # At the last step all tokens of both ranks are counted; the rest of the run adds only time.
    assert curve(folder, "perf/tokens_per_wall_second")[10] > totals["tokens_per_wall_second"]
    before = (folder / "summary.json").read_text(), exported(folder)
    job = train(folder, f"{SHARDED} {model}")
    assert "this run is finished" in job.printed()
    assert (folder / "summary.json").read_text() == before[0] and same_bits(exported(folder), before[1])


# Under torchrun itself


def torchrun(argv: list[str], output: Path, gate: Path) -> None:
    """Run torchrun in a process that has imported everything; its ranks are forks of this one."""
    redirect(output)
    torch.set_num_threads(1)
    progress.WRITE_INTERVAL_SECONDS = 0.0
    hold_after_step_4(gate, 0)
    distributed_run.main(["--start_method=fork", "--run_path", *argv])


def start_torchrun(folder: Path, flags: str, gate: Path) -> Job:
    output = folder.with_name(f"{folder.name}.output")
    output.mkdir(parents=True)
    options = f"--standalone --nproc_per_node=2 --max_restarts=1 {ROOT / 'train_multi_gpu.py'}"
    argv = shlex.split(f"{options} {SMALL} --output_dir {folder} {flags}")
    agent = jobs.children.enter_context(forked(torchrun, argv, output / "agent", gate))
    return Job(folder, output, [agent], store=None)


def find_ranks(agent: int) -> list[int]:
    """Return the processes of torchrun's ranks, in the order in which it started them."""
    ranks = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, *more = path.read_text().rpartition(")")[2].split()
            if int(parent) == agent and state != "Z":
                ranks.append((int(more[17]), int(path.parent.name)))  # time of its start, in 1/100 s
    return [pid for _, pid in sorted(ranks)]


def test_torchrun_restarts_a_killed_rank_and_the_same_command_a_stopped_job(model, sharded, tmp_path):
    """With --max_restarts all ranks restart and resume; SIGTERM to one of them saves and ends the job."""
    folder, flags, gate = tmp_path / "run", f"{SHARDED} {model}", tmp_path / "gate"
    job = start_torchrun(folder, flags, gate)
    (agent,) = job.ranks
    for start_number, number in enumerate((signal.SIGKILL, signal.SIGTERM)):
        # Step 3 is saved. The restarted job has its log until it discards step 4.
        wait_until(lambda count=start_number: job.printed().count("step 4/10") > count, job)
        _, second = find_ranks(agent.pid)
        os.kill(second, number)
        gate.with_suffix(f".{start_number}").touch()
        wait_until((folder / "metrics.discarded.jsonl").exists, job)
    assert job.wait() == [1], job.printed()
    output = job.printed()
    for part in ("resumed from", "stopped by a signal", f"exitcode: {EXIT_INTERRUPTED}"):
        assert part in re.sub(" +:", ":", output), output
    assert not (folder / "summary.json").exists()
    train(folder, flags)
    assert curve(folder) == curve(sharded["fp32"])
    assert same_bits(exported(folder), exported(sharded["fp32"]))
    by_kind = summary(folder)["wall_seconds_by_kind"]
    assert by_kind["lost"] > 0, "step 4 was done again after the kill"
    assert sum(by_kind.values()) == pytest.approx(summary(folder)["runtime_seconds"])
