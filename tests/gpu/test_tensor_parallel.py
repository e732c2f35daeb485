"""Tensor parallelism with Transformer Engine against one GPU: two ranks on one GPU through Gloo, or NCCL."""

import json
from pathlib import Path

import pytest
import torch
from fp8_suite.te_models.kernels.loss import IGNORE, softmax_gradient

from tests.gpu.test_multi_gpu import GPUS, LONG, ROWS, flags, launch, logged, summary

PRECISIONS = {"bf16": "bf16", "delayed": "delayed", "current": "current"}
# Parts of its key/value heads are whole blocks. TE gathers them in a way that Gloo lacks.
BLOCK = {"block": "fp8 --fp8_scenario block --model_name tiny-qwen3"}
UNSAVED = "--no_save_checkpoints --no_export"
OPTIONS = {
    "packed": "",
    "padded": "--no_packing",
    "qwen2": "--model_name tiny-qwen2",
    "qwen3": "--model_name tiny-qwen3",
    "head": "--fp8_lm_head",
    **{level: f"--recompute {level}" for level in ("cheap", "mlp", "layer", "full")},
}
SAME_MODEL = {"packed", "cheap", "mlp", "layer", "full"}  # their reference is the run without options


def settings(precision: str, options: str, *, ranks: int = 1, tp: int = 1, mode: str = "ddp") -> str:
    """Return the flags of a run whose ranks read all rows of a step."""
    accumulates = 2 if mode == "fsdp_grad" else 1
    chosen = (PRECISIONS | BLOCK)[precision]
    sharding = flags(mode if ranks > 1 else "", chosen, gpus=ranks, accumulation=accumulates, steps=LONG)
    rows = ROWS * tp // ranks // accumulates
    return f"{sharding} --batch_size {rows} --tensor_parallel_size {tp} {options}"


def options_of(precision: str) -> dict[str, str]:
    return {name: option for name, option in OPTIONS.items() if precision != "bf16" or name != "head"}


def runs_of(precisions: dict[str, str], *, ranks: int = 2) -> dict[str, str]:
    shared = {"ranks": ranks, "tp": 2}
    runs = {f"{p}-{mode}": settings(p, UNSAVED, mode=mode, **shared) for p in precisions for mode in MODES}
    return runs | {
        f"{precision}-ddp-{name}": settings(precision, f"{option} {UNSAVED}", **shared)
        for precision in ("bf16", "delayed")
        for name, option in options_of(precision).items()
        if option
    }


MODES = ("ddp", "fsdp_full", "fsdp_grad")


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    """Runs on one GPU in every precision and with every model."""
    folder = tmp_path_factory.mktemp("one")
    runs = {precision: settings(precision, UNSAVED) for precision in PRECISIONS | BLOCK}
    runs |= {
        f"{precision}-{name}": settings(precision, f"{option} {UNSAVED}")
        for precision in ("bf16", "delayed")
        for name, option in options_of(precision).items()
        if name not in SAME_MODEL
    }
    launch(folder, runs, 1)
    return folder


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """Runs of two ranks on one GPU, through Gloo."""
    folder = tmp_path_factory.mktemp("shared")
    launch(folder, runs_of(PRECISIONS), 2, SHARE_GPU="1")
    return folder


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    """Runs of two ranks on two GPUs, through NCCL."""
    if GPUS < 2:
        pytest.skip("needs two GPUs")
    folder = tmp_path_factory.mktemp("many")
    launch(folder, runs_of(PRECISIONS | BLOCK), 2)
    return folder


def same_run(folder: Path, one: Path, name: str) -> None:
    precision, _, *options = name.split("-")
    option = options[0] if options else "packed"
    reference = one / (precision if option in SAME_MODEL else f"{precision}-{option}")
    run, is_bf16 = folder / name, precision == "bf16"
    expected, actual = (logged(path, "train/loss") for path in (reference, run))
    assert sorted(actual) == list(range(1, LONG + 1))
    gaps = [abs(actual[step] / expected[step] - 1) for step in expected]
    norms = [logged(path, "train/grad_norm")[1] for path in (reference, run)]
    print(f"{name}: first gap {gaps[0]:.1e}, largest {max(gaps):.1e}, norms {norms}")
    assert gaps[0] < (2e-4 if is_bf16 else 2e-3) and max(gaps) < (1e-3 if is_bf16 else 5e-3)
    assert norms[1] == pytest.approx(norms[0], rel=1e-2 if is_bf16 else 5e-2)
    for count in ("label_tokens", "tokens", "eval_label_tokens"):
        assert summary(run)[count] == summary(reference)[count]
    assert summary(run)["eval_loss"] == pytest.approx(summary(reference)["eval_loss"], rel=2e-2)
    states = json.loads((folder / f"{name}.ranks.json").read_text())
    assert len({rank["scaling"] for rank in states}) == 1, "scales differ between ranks"


@pytest.mark.gpu
@pytest.mark.parametrize("name", runs_of(PRECISIONS))
def test_two_ranks_on_one_gpu_have_its_losses(name, shared, one):
    same_run(shared, one, name)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", runs_of(PRECISIONS | BLOCK))
def test_two_gpus_have_the_losses_of_one(name, many, one):
    same_run(many, one, name)


@pytest.mark.multi_gpu
def test_four_gpus_share_layers_in_pairs(one, tmp_path):
    if GPUS < 4:
        pytest.skip("needs four GPUs")
    names = {f"{precision}-{mode}": (precision, mode) for precision in PRECISIONS for mode in MODES}
    runs = {n: settings(p, UNSAVED, ranks=4, tp=2, mode=mode) for n, (p, mode) in names.items()}
    launch(tmp_path, runs, 4)
    for name in names:
        same_run(tmp_path, one, name)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "delayed"])
def test_a_run_resumes_in_its_layout_and_on_one_rank(precision, tmp_path):
    """Gradients of attention are not deterministic; tests on CPUs compare bits."""
    saved = "--save_interval 6 --keep_last 10 --no_export --moment_dtype fp8"
    (tmp_path / "first").mkdir()
    first = settings(precision, saved, ranks=2, tp=2, mode="fsdp_full")
    launch(tmp_path / "first", {"run": first}, 2, SHARE_GPU="1")
    run = tmp_path / "first" / "run"
    expected = {step: loss for step, loss in logged(run, "train/loss").items() if step > 6}
    for ranks, rel in ((2, 5e-3), (1, 1e-2)):
        folder = tmp_path / f"on {ranks}"
        folder.mkdir()
        layout = {"ranks": ranks, "tp": ranks, "mode": "fsdp_full"}
        resumed = settings(precision, f"{saved} --resume {run}/checkpoints/step_000006", **layout)
        launch(folder, {"run": resumed}, ranks, **({"SHARE_GPU": "1"} if ranks > 1 else {}))
        assert logged(folder / "run", "train/loss") == pytest.approx(expected, rel=rel)


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [4096, 5000])
def test_the_kernel_writes_the_gradient_of_a_part_of_the_vocabulary(vocabulary):
    from fp8_suite.te_models.kernels.loss_triton import write_softmax_gradient_

    torch.manual_seed(0)
    logits = torch.randn(37, vocabulary, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(vocabulary, (37,), device="cuda")
    labels[::3], labels[1::3] = IGNORE, -1  # without a label; its label is in another part
    log_sum = logits.float().logsumexp(-1) + 0.7
    expected = softmax_gradient(logits, labels, log_sum)
    write_softmax_gradient_(logits, labels, log_sum, ignore=IGNORE)
    torch.testing.assert_close(logits.float(), expected, rtol=1e-2, atol=1e-6)
