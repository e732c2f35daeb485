"""Two ranks on one GPU, through Gloo: sharding, recomputation and FP8 state; says nothing about speed."""

import json
from pathlib import Path

import pytest
import torch

from tests.gpu.test_multi_gpu import STEPS, check_offload, flags, logged, start, whole_checkpoint

pytestmark = pytest.mark.gpu
MODES = ("ddp", "fsdp_full", "fsdp_grad")
RANKS = 2
OPTIONS = {
    "plain": "",
    "mlp": "--recompute mlp",
    "layer": "--recompute layer:2+full --offload_activations",
    "sent": "--grad_reduce_dtype fp8",
    "moments": "--moment_dtype fp8,fp16",
}


def run_all(folder: Path, runs: dict[str, str], ranks: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "runs.json"
    path.write_text(json.dumps(runs))
    start("many_runs.py", path, ranks, SHARE_GPU="1")


def settings(mode: str, options: str, *, ranks: int = RANKS) -> str:
    return f"{flags(mode, 'delayed', gpus=ranks, accumulation=2)} --no_export {options}"


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    run_all(folder, {name: settings("", OPTIONS[name], ranks=1) for name in ("plain", "moments")}, 1)
    return folder


@pytest.fixture(scope="module", params=MODES)
def many(request, tmp_path_factory) -> tuple[str, Path]:
    mode, folder = request.param, tmp_path_factory.mktemp(request.param)
    run_all(folder, {name: settings(mode, options) for name, options in OPTIONS.items()}, RANKS)
    return mode, folder


def test_two_ranks_have_the_losses_of_one(one, many):
    folder = many[1]
    for name in OPTIONS:
        expected = logged(one / ("moments" if name == "moments" else "plain"), "train/loss")
        actual = logged(folder / name, "train/loss")
        gap = max(abs(actual[step] / expected[step] - 1) for step in expected)
        print(f"{many[0]} {name}: largest gap {gap:.1e}")
        assert sorted(actual) == list(range(1, STEPS + 1))
        assert gap < 2e-2, name
        states = json.loads((folder / f"{name}.ranks.json").read_text())
        assert len({rank["scaling"] for rank in states}) == 1, "scales differ between ranks"


def test_recomputation_on_two_ranks_has_the_same_losses(many):
    plain = logged(many[1] / "plain", "train/loss")
    for name in ("mlp", "layer"):
        actual = logged(many[1] / name, "train/loss")
        assert actual[1] == pytest.approx(plain[1], rel=1e-4) and actual == pytest.approx(plain, rel=1e-2)


def test_moments_of_two_ranks_resume_on_one_bit_for_bit(many, tmp_path):
    run = many[1] / "moments"
    resume = f"--resume {run}/checkpoints/step_{STEPS:06d}"
    run_all(tmp_path, {"again": settings("", f"{OPTIONS['moments']} {resume}", ranks=1)}, 1)
    expected, actual = whole_checkpoint(run), whole_checkpoint(tmp_path / "again")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(("mode", "other_mode"), [("ddp", "fsdp_full"), ("fsdp_full", "ddp")])
def test_an_offloaded_optimizer_changes_no_bits_and_its_state_is_resharded(mode, other_mode, tmp_path):
    check_offload(mode, other_mode, "bf16", RANKS, tmp_path, SHARE_GPU="1")


@pytest.mark.parametrize(("mode", "other_mode"), [("fsdp_full", "fsdp_grad"), ("fsdp_grad", "fsdp_full")])
def test_an_offloaded_optimizer_of_fp8_weights_changes_no_bits(mode, other_mode, tmp_path):
    check_offload(mode, other_mode, "current", RANKS, tmp_path, "--fp8_all_gather", SHARE_GPU="1")
