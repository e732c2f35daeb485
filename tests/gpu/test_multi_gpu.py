"""Every sharding mode with Transformer Engine on two to four GPUs, against runs on one GPU."""

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fp8_suite.training.checkpoint.manifest import read_manifest, verify
from fp8_suite.training.checkpoint.store import Checkpoints
from safetensors.torch import load_file

from tests.children import running
from tests.hugging_face_models import save_mixture

pytestmark = pytest.mark.multi_gpu
ROOT = Path(__file__).resolve().parents[2]
GPUS = min(4, torch.cuda.device_count())
ROWS = 8  # per optimizer step, on all GPUs together
FSDP = ["fsdp_full", "fsdp_grad", "hsdp"]
ZERO = ["ds_zero1", "ds_zero2", "ds_zero3", "ds_zero3_offload"]
MODES = ["ddp", *FSDP, *ZERO]
PRECISIONS = {
    "bf16": "bf16",
    "delayed": "fp8 --fp8_scenario delayed",
    "current": "fp8 --fp8_scenario current",
}
STEPS = 12
LONG = 50  # steps of runs on other parallel axes, whose rounding adds up
# What --deterministic sets in a command, for runs of many_runs.py.
DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def flags(mode: str, precision: str, *, gpus: int = GPUS, accumulation: int = 1, steps: int = STEPS) -> str:
    rows = ROWS // gpus // accumulation
    rate, interval = (1e-3, 5) if steps == STEPS else (2e-4, 25)
    sharding = f"--sharding_mode {mode}" if gpus > 1 else ""
    if mode == "hsdp":
        sharding += f" --hsdp_shard_size {gpus // 2}"
    return (
        "--use_te --num_of_samples 400 --max_seq_length 256 --eval_split test --eval_samples 20 "
        "--num_workers 0 --num_proc 1 "
        f"--learning_rate {rate} --log_interval 1 --eval_interval {interval} --save_interval 0 "
        f"--max_steps {steps} "
        f"--batch_size {rows} --gradient_accumulation_steps {accumulation} --eval_batch_size 2 "
        f"--mixed_precision {PRECISIONS.get(precision, precision)} {sharding}"
    )


def launch(folder: Path, runs: dict[str, str], gpus: int, **variables: str) -> str:
    """Execute all runs in one set of processes and return the output; fail if one fails."""
    (folder / "runs.json").write_text(json.dumps(runs))
    return start("many_runs.py", folder / "runs.json", gpus, **variables)


def start(script: str, argument: Path, gpus: int, **variables: str) -> str:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"] if gpus > 1 else []
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"} | variables
    done = subprocess.run(
        [sys.executable, *torchrun, str(ROOT / "tests" / "gpu" / script), str(argument)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    print(done.stdout[-20000:])
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    if GPUS < 2:
        pytest.skip("needs two GPUs")
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def one(folder) -> Path:
    """Folder of the runs on one GPU in every precision."""
    path = folder / "one"
    path.mkdir()
    launch(path, {f"single-{p}": flags("", p, gpus=1) for p in PRECISIONS}, 1)
    return path


def group(modes: list[str]) -> dict[str, str]:
    """Return the runs of these modes; only BF16 and delayed scaling keep checkpoints and exports."""
    kept = {f"{m}-{p}": flags(m, p) for m in modes for p in ("bf16", "delayed")}
    runs = {f"{m}-current": flags(m, "current") for m in modes}
    runs |= {f"{m}-bf16-2": flags(m, "bf16", accumulation=2) for m in modes}
    summed = {m: flags(m, "current", accumulation=2) for m in modes if m not in ZERO}
    runs |= {f"{m}-current-2": options for m, options in summed.items()}
    runs |= {
        f"{m}-current-2-recomputed": f"{options} --gradient_checkpointing" for m, options in summed.items()
    }
    runs |= {f"{m}-recomputed": f"{flags(m, 'delayed')} --gradient_checkpointing" for m in modes}
    return kept | {name: f"{options} --no_save_checkpoints --no_export" for name, options in runs.items()}


class Families:
    """Run folders by mode; the modes of a family run together at the first access to one of them."""

    members = (["ddp"], FSDP[:2], FSDP[2:], ZERO[:2], ZERO[2:])

    def __init__(self, folder: Path):
        self.folder = folder

    def __getitem__(self, mode: str) -> Path:
        modes = next(modes for modes in self.members if mode in modes)
        path = self.folder / modes[0]
        if not path.exists():
            path.mkdir()
            launch(path, group(modes), GPUS)
        return path


@pytest.fixture(scope="module")
def many(folder) -> Families:
    return Families(folder)


def logged(run: Path, name: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


def test_fp16_has_the_losses_of_one_gpu_in_every_mode_with_its_loss_scale(folder):
    """With accumulation TE's wgrad GEMMs add FP16 products to FP32 sums under FSDP."""
    path, unsaved = folder / "fp16", " --no_save_checkpoints --no_export"
    path.mkdir()
    launch(path, {"single": flags("", "fp16", gpus=1) + unsaved}, 1)
    modes = ["ddp", *FSDP]
    runs = {f"{mode}-{n}": flags(mode, "fp16", accumulation=n) + unsaved for mode in modes for n in (1, 2)}
    launch(path, runs, GPUS)
    expected, scales = (logged(path / "single", f"train/{name}") for name in ("loss", "loss_scale"))
    assert sorted(expected) == list(range(1, STEPS + 1))
    for name in runs:
        losses, run_scales = (logged(path / name, f"train/{value}") for value in ("loss", "loss_scale"))
        gap = max(abs(losses[step] - expected[step]) / expected[step] for step in expected)
        print(name, f"largest loss gap {gap:.1e}, last loss scale {run_scales[STEPS]}")
        assert run_scales[STEPS] >= 2**12
        # The gradient of one rank's rows may overflow where the mean over all rows does not.
        assert gap < (5e-3 if run_scales == scales else 5e-2), name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_mode_has_the_losses_of_one_gpu(one, many, mode, precision):
    reference, run = one / f"single-{precision}", many[mode] / f"{mode}-{precision}"
    expected, actual = (logged(r, "train/loss") for r in (reference, run))
    assert sorted(actual) == list(range(1, STEPS + 1))
    gaps = [abs(actual[step] - expected[step]) / expected[step] for step in expected]
    reference_norms, norms = (logged(r, "train/grad_norm") for r in (reference, run))
    first_norms = f"{norms[1]:.4f}, {reference_norms[1]:.4f}"
    print(mode, precision, f"largest loss gap {max(gaps):.1e}, first norms {first_norms}")
    assert gaps[0] < (1e-4 if precision == "bf16" else 2e-3)
    assert max(gaps) < (5e-3 if precision == "bf16" else 2e-2)
    assert norms[1] == pytest.approx(reference_norms[1], rel=1e-2 if precision == "bf16" else 5e-2)
    for name in ("label_tokens", "tokens", "eval_label_tokens"):
        assert summary(run)[name] == summary(reference)[name]
    assert summary(run)["eval_loss"] == pytest.approx(summary(reference)["eval_loss"], rel=2e-2)
    states = json.loads((many[mode] / f"{mode}-{precision}.ranks.json").read_text())
    assert len({rank["scaling"] for rank in states}) == 1, "scales differ between ranks"
    assert bool(states[0]["scaling"]) == (precision == "delayed")
    rows = json.loads((run / "env.json").read_text())["coverage"]
    assert bool(rows["fp8_modules"]) == (precision != "bf16")


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        *itertools.product(MODES, ["bf16-2"]),
        *itertools.product(["ddp", *FSDP], ["current-2", "current-2-recomputed"]),
    ],
)
def test_accumulation_has_the_same_losses(many, mode, name):
    precision = name.split("-")[0]
    first, all_steps = (1e-4, 5e-3) if precision == "bf16" else (2e-3, 2e-2)
    once, twice = (logged(many[mode] / f"{mode}-{n}", "train/loss") for n in (precision, name))
    assert twice[1] == pytest.approx(once[1], rel=first)
    assert twice == pytest.approx(once, rel=all_steps)
    norms = [logged(many[mode] / f"{mode}-{n}", "train/grad_norm")[1] for n in (precision, name)]
    assert norms[1] == pytest.approx(norms[0], rel=5e-2)


@pytest.mark.parametrize("mode", ["ddp", *FSDP])
def test_gradients_sent_in_fp8_have_about_the_same_losses(tmp_path, mode):
    if mode == "hsdp" and GPUS < 4:
        pytest.skip("needs groups of several GPUs: copies of a shard are not summed in FP8")
    common = f"{flags(mode, 'bf16')} --no_save_checkpoints --no_export"
    launch(tmp_path, {"fp32": common, "fp8": f"{common} --grad_reduce_dtype fp8"}, GPUS)
    exact, sent = (logged(tmp_path / name, "train/loss") for name in ("fp32", "fp8"))
    assert sent[1] == pytest.approx(exact[1], rel=1e-5) and sent != exact
    assert sent == pytest.approx(exact, rel=1e-2)


@pytest.mark.parametrize("mode", ["ddp", "fsdp_grad"])
def test_weights_are_cast_once_per_step_unless_layers_are_recomputed(many, mode):
    """`test_accumulation_has_the_same_losses` compares both runs."""
    names = (f"{mode}-current-2", f"{mode}-current-2-recomputed")
    kept, cast = (json.loads((many[mode] / f"{name}.ranks.json").read_text()) for name in names)
    assert all(rank["fp8_weights"] for rank in kept) and not any(rank["fp8_weights"] for rank in cast)


@pytest.mark.parametrize("mode", MODES)
def test_recomputation_has_the_same_losses(many, mode):
    plain, again = (logged(many[mode] / f"{mode}-{name}", "train/loss") for name in ("delayed", "recomputed"))
    assert again[1] == pytest.approx(plain[1], rel=1e-4)
    assert again == pytest.approx(plain, rel=1e-2)


@pytest.mark.parametrize("mode", ["fsdp_full", "fsdp_grad"])
def test_fp8_all_gather_has_the_same_losses_and_resumes_exactly(tmp_path, one, mode):
    """Weights are rounded to FP8 in both runs; only the source of their scales may differ."""
    fp8 = f"{flags(mode, 'current')} --fp8_all_gather"
    launch(tmp_path, {"whole": fp8}, GPUS)
    expected, actual = (logged(r, "train/loss") for r in (one / "single-current", tmp_path / "whole"))
    gaps = [abs(actual[step] - expected[step]) / expected[step] for step in expected]
    print(mode, f"gathered in FP8: largest loss gap {max(gaps):.1e}")
    assert gaps[0] < 2e-3 and max(gaps) < 2e-2
    resume = f"{fp8} --no_export --resume {tmp_path}/whole/checkpoints/step_{STEPS:06d}"
    launch(tmp_path, {"again": resume}, GPUS)
    saved, again = (whole_checkpoint(tmp_path / name) for name in ("whole", "again"))
    assert saved.keys() == again.keys() and all(torch.equal(saved[key], again[key]) for key in saved)
    exported = load_file(tmp_path / "whole" / "export" / "model.safetensors")
    weight = saved["model/layers.2.self_attention.proj.weight"]
    assert torch.equal(exported["model.layers.2.self_attn.o_proj.weight"], weight)


def test_a_70b_is_built_on_the_meta_device_and_loaded_in_shards(folder, tmp_path):
    print(start("sharded_load.py", tmp_path, GPUS).splitlines()[-1])


def test_weights_from_files_reach_every_shard(tmp_path, one):
    """An exported model, loaded in shards, has the evaluation loss of the run that exported it."""
    score = f"--model_name {one}/single-bf16/export --init pretrained --max_steps 0 --no_save_checkpoints"
    launch(tmp_path, {m: f"{flags(m, 'bf16')} {score}" for m in ("ddp", "fsdp_full")}, GPUS)
    for mode in ("ddp", "fsdp_full"):
        ran = summary(one / "single-bf16")["eval_loss"]
        assert summary(tmp_path / mode)["eval_loss"] == pytest.approx(ran, rel=1e-3)


def test_a_model_that_only_transformers_can_load_is_sharded_from_the_cpu(tmp_path):
    save_mixture(tmp_path / "model")
    rows = (
        f"--num_of_samples 400 --max_seq_length 256 --batch_size {ROWS // GPUS} --num_workers 0 --num_proc 1"
    )
    run = f"--model_name {tmp_path / 'model'} --tokenizer_name demo {rows} --max_steps 8 --log_interval 1"
    run += " --no_compile --no_export --no_save_checkpoints --eval_samples 0 --sharding_mode"
    launch(tmp_path, {mode: f"{run} {mode}" for mode in ("ddp", "fsdp_full")}, GPUS)
    sharded, expected = (logged(tmp_path / mode, "train/loss") for mode in ("fsdp_full", "ddp"))
    assert sharded == pytest.approx(expected, rel=1e-2) and len(sharded) == 8


@pytest.mark.parametrize("mode", MODES)
def test_the_export_contains_the_trained_weights(many, mode):
    """Exported tensors equal the checkpoint's BF16 weights; only ties round differently."""
    run = many[mode] / f"{mode}-bf16"
    exported = load_file(run / "export" / "model.safetensors")
    saved = whole_checkpoint(run)
    names = {"model.norm.weight": "norm.weight"}
    names |= {"model.layers.2.self_attn.o_proj.weight": "layers.2.self_attention.proj.weight"}
    for exported_name, name in names.items():
        torch.testing.assert_close(exported[exported_name], saved[f"model/{name}"], rtol=2**-7, atol=0)
        assert (exported[exported_name] != saved[f"model/{name}"]).float().mean() < 1e-3


def whole_checkpoint(run: Path) -> dict[str, torch.Tensor]:
    """Load every tensor of the last checkpoint from the files of all ranks."""
    checkpoints = Checkpoints(run / "checkpoints", keep_last=1)
    path = checkpoints.latest()
    manifest = read_manifest(path)["tensors"]
    wanted = {k: v for k, v in manifest.items() if k.startswith(("model/", "optimizer/"))}
    tensors = {k: torch.empty(v["shape"], dtype=getattr(torch, v["dtype"][6:])) for k, v in wanted.items()}
    checkpoints.load(path, tensors)
    return tensors


@pytest.mark.parametrize(
    ("source", "targets"),
    [("fsdp_full", ["ddp", "fsdp_grad"]), ("fsdp_full", ZERO), ("ds_zero2", ["ddp", "ds_zero3"])],
    ids=["fsdp", "fsdp to zero", "zero"],
)
def test_a_run_resumes_in_every_mode_with_exact_weights_and_optimizer(tmp_path, many, source, targets):
    """A checkpoint that is resumed and saved again without a step is bit-identical, also on one GPU."""
    first, path = many[source] / f"{source}-delayed", tmp_path
    resume = f"--resume {first}/checkpoints/step_{STEPS:06d} --no_export"
    launch(path, {mode: f"{flags(mode, 'delayed')} {resume}" for mode in targets}, GPUS)
    launch(path, {"single": f"{flags('', 'delayed', gpus=1)} {resume}"}, 1)
    expected = whole_checkpoint(first)
    for name in (*targets, "single"):
        actual = whole_checkpoint(path / name)
        assert actual.keys() == expected.keys(), name
        different = [key for key, tensor in expected.items() if not torch.equal(tensor, actual[key])]
        assert not different, (name, different[:5])
        assert summary(path / name)["eval_loss"] == pytest.approx(summary(first)["eval_loss"], rel=2e-3)


@pytest.mark.parametrize("mode", ["ddp", "fsdp_full", "fsdp_grad", "hsdp"])
def test_an_offloaded_optimizer_changes_no_bits_and_its_state_is_resharded(folder, tmp_path, mode):
    check_offload(mode, "fsdp_full" if mode == "hsdp" else "hsdp", "bf16", GPUS, tmp_path)


def check_offload(
    mode: str, other_mode: str, precision: str, gpus: int, folder: Path, options: str = "", **variables: str
) -> None:
    """Train with and without --offload_optimizer, and resume in another mode without a step."""
    common = f"--moment_dtype fp8,fp32 --deterministic --no_export {options}"
    plain, there = (f"{flags(m, precision, gpus=gpus)} {common}" for m in (mode, other_mode))
    resume = f"--offload_optimizer --resume {folder}/offloaded/checkpoints/step_{STEPS:06d}"
    runs = {"plain": plain, "offloaded": f"{plain} --offload_optimizer", "resumed": f"{there} {resume}"}
    printed = launch(folder, runs, gpus, **DETERMINISTIC | variables)
    assert printed.count("FP8 and FP32 moments, offloaded") == 2
    assert logged(folder / "offloaded", "train/loss") == logged(folder / "plain", "train/loss")
    expected = whole_checkpoint(folder / "plain")
    for name in ("offloaded", "resumed"):
        actual = whole_checkpoint(folder / name)
        assert actual.keys() == expected.keys()
        assert not [key for key, tensor in expected.items() if not torch.equal(tensor, actual[key])], name


def command(folder: Path, steps: int) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={GPUS}"]
    settings = flags("fsdp_full", "delayed").replace(f"--max_steps {STEPS}", f"--max_steps {steps}")
    options = "--save_interval 5 --eval_interval 0 --num_workers 2 --no_export"
    words = shlex.split(f"train_multi_gpu.py {settings} {options}")
    return [*torchrun, *words, "--output_dir", str(folder)]


def signal_a_worker(folder: Path, steps: int, number: int) -> tuple[subprocess.Popen, float]:
    """Start a run, signal its second rank once steps are logged; return process and seconds to its exit."""
    with running(
        command(folder, steps), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and process.poll() is None:
            if (folder / "metrics.jsonl").exists() and len(logged(folder, "train/loss")) >= 7:
                break
            time.sleep(0.05)
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout
        sent = time.monotonic()
        os.kill(int(children.split()[1]), number)
        output, _ = process.communicate(timeout=300)
        print(output[-4000:])
        return process, time.monotonic() - sent


def test_sigterm_to_one_rank_saves_and_the_same_command_resumes(folder):
    run = folder / "stopped"
    process, _ = signal_a_worker(run, 400, signal.SIGTERM)
    assert process.returncode != 0
    path = Checkpoints(run / "checkpoints", keep_last=5).latest()
    stopped_at = int(path.name.removeprefix("step_"))
    assert 7 <= stopped_at < 400 and max(logged(run, "train/loss")) == stopped_at
    done = subprocess.run([*command(run, 400), "--max_steps", str(stopped_at + 3)], cwd=ROOT)
    assert done.returncode == 0
    assert sorted(logged(run, "train/loss")) == list(range(1, stopped_at + 4))


def test_a_killed_rank_ends_the_job_and_keeps_the_last_checkpoint(folder):
    run = folder / "killed"
    process, seconds = signal_a_worker(run, 4000, signal.SIGKILL)
    print(f"the job ended after {seconds:.0f} s")
    assert process.returncode != 0 and seconds < 100
    checkpoints = Checkpoints(run / "checkpoints", keep_last=5)
    verify(checkpoints.latest())
