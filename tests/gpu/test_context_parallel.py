"""Context parallelism with Transformer Engine against one GPU: two ranks on one GPU through Gloo, or NCCL."""

import json
from pathlib import Path

import pytest

from tests.gpu.test_multi_gpu import GPUS, LONG, ROWS, flags, launch, logged, summary

PRECISIONS = {"bf16": "bf16", "delayed": "delayed", "current": "current", "block": "fp8 --fp8_scenario block"}
UNSAVED = "--no_save_checkpoints --no_export"
# Rows of several samples, rows of one sample each, and recomputed layers, which exchange keys again.
OPTIONS = {"packed": "", "padded": "--no_packing", "layer": "--recompute layer", "full": "--recompute full"}


def settings(precision: str, options: str, *, ranks: int = 1, comm: str = "") -> str:
    """Return the flags of a run whose ranks share all rows of a step."""
    shared = f"--context_parallel_size {ranks} --cp_comm_type {comm}" if comm else ""
    mode = flags("fsdp_full" if comm else "", PRECISIONS[precision], gpus=ranks, steps=LONG)
    return f"{mode} --batch_size {ROWS} {shared} {options}"


def runs_of(comms: list[str], ranks: int) -> dict[str, str]:
    whole = {
        f"{comm}-{precision}": settings(precision, UNSAVED, ranks=ranks, comm=comm)
        for comm in comms
        for precision in PRECISIONS
    }
    options = {name: flag for name, flag in OPTIONS.items() if flag}
    return whole | {
        f"{comm}-bf16-{name}": settings("bf16", f"{flag} {UNSAVED}", ranks=ranks, comm=comm)
        for comm in comms
        for name, flag in options.items()
    }


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    """Runs on one GPU in every precision, and padded."""
    folder = tmp_path_factory.mktemp("one")
    runs = {precision: settings(precision, UNSAVED) for precision in PRECISIONS}
    launch(folder, runs | {"bf16-padded": settings("bf16", f"--no_packing {UNSAVED}")}, 1)
    return folder


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """Runs of two ranks on one GPU, through Gloo."""
    folder = tmp_path_factory.mktemp("shared")
    launch(folder, runs_of(["all_gather", "a2a"], 2), 2, SHARE_GPU="1")
    return folder


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    """Runs of two ranks on two GPUs, through NCCL."""
    if GPUS < 2:
        pytest.skip("needs two GPUs")
    folder = tmp_path_factory.mktemp("many")
    launch(folder, runs_of(["p2p", "all_gather", "a2a"], 2), 2)
    return folder


def same_run(folder: Path, one: Path, name: str) -> None:
    comm, precision, *options = name.split("-")
    reference = one / (f"{precision}-padded" if options == ["padded"] else precision)
    run, is_bf16 = folder / name, precision == "bf16"
    expected, actual = (logged(path, "train/loss") for path in (reference, run))
    assert sorted(actual) == list(range(1, LONG + 1))
    gaps = [abs(actual[step] / expected[step] - 1) for step in expected]
    norms = [logged(path, "train/grad_norm")[1] for path in (reference, run)]
    environment = json.loads((run / "env.json").read_text())
    kernel = environment["attention_backend"]
    print(f"{name}: first gap {gaps[0]:.1e}, largest {max(gaps):.1e}, norms {norms}, {kernel}")
    assert gaps[0] < (1e-4 if is_bf16 else 2e-3) and max(gaps) < (1e-3 if is_bf16 else 5e-3)
    assert norms[1] == pytest.approx(norms[0], rel=1e-2 if is_bf16 else 5e-2)
    for count in ("label_tokens", "tokens", "eval_label_tokens"):
        assert summary(run)[count] == summary(reference)[count]
    assert summary(run)["eval_loss"] == pytest.approx(summary(reference)["eval_loss"], rel=2e-2)
    assert environment["cp_comm_type"] == comm and kernel in ("fused", "flash")
    states = json.loads((folder / f"{name}.ranks.json").read_text())
    assert len({rank["scaling"] for rank in states}) == 1, "scales differ between ranks"


@pytest.mark.gpu
@pytest.mark.parametrize("name", runs_of(["all_gather", "a2a"], 2))
def test_two_ranks_on_one_gpu_have_its_losses(name, shared, one):
    same_run(shared, one, name)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", runs_of(["p2p", "all_gather", "a2a"], 2))
def test_two_gpus_have_the_losses_of_one(name, many, one):
    same_run(many, one, name)


@pytest.mark.gpu
def test_a_run_resumes_in_its_layout_and_on_one_rank(tmp_path):
    """Gradients of attention are not deterministic; tests on CPUs compare bits."""
    saved = "--save_interval 25 --no_export"
    (tmp_path / "first").mkdir()
    launch(tmp_path / "first", {"run": settings("bf16", saved, ranks=2, comm="a2a")}, 2, SHARE_GPU="1")
    run = tmp_path / "first" / "run"
    expected = {step: loss for step, loss in logged(run, "train/loss").items() if step > 25}
    for ranks, comm, rel in ((2, "a2a", 1e-3), (1, "", 5e-3)):
        folder = tmp_path / f"on {ranks}"
        folder.mkdir()
        resumed = settings("bf16", f"{saved} --resume {run}/checkpoints/step_000025", ranks=ranks, comm=comm)
        launch(folder, {"run": resumed}, ranks, **({"SHARE_GPU": "1"} if ranks > 1 else {}))
        assert logged(folder / "run", "train/loss") == pytest.approx(expected, rel=rel)


@pytest.mark.multi_gpu
def test_heads_and_rings_on_four_gpus(one, tmp_path):
    if GPUS < 4:
        pytest.skip("needs four GPUs")
    name = "a2a+p2p-bf16-padded"
    options = f"--no_packing {UNSAVED}"
    launch(tmp_path, {name: settings("bf16", options, ranks=4, comm="a2a+p2p")}, 4)
    same_run(tmp_path, one, name)
