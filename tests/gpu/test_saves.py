"""Saves in the background hold the same bits as synchronous ones, whatever the update does meanwhile."""

import json
from pathlib import Path

import pytest
import torch
from fp8_suite.training.checkpoint.staging import Stager

from tests.gpu.models import DEVICE
from tests.gpu.test_multi_gpu import DETERMINISTIC, PRECISIONS, STEPS, flags, launch

pytestmark = pytest.mark.gpu
OPTIONS = {
    "delayed": "",
    "current": f"--mixed_precision {PRECISIONS['current']} --moment_dtype fp8",
    "offload": "--offload_optimizer --moment_dtype fp8",
    "weights": "--offload_optimizer --fp8_weights",
    "layers": "--no_use_te --mixed_precision bf16",
}
SHARDED = {mode: f"--sharding_mode {mode}" for mode in ("ddp", "fsdp_full", "fsdp_grad")}
SHARDED |= {
    "offload": "--sharding_mode fsdp_full --offload_optimizer",
    "fp8": "--sharding_mode fsdp_full --fp8_all_gather",
}


def files(run: Path) -> dict[str, dict]:
    """Return checksums of all checkpoints' tensors."""
    manifests = {path: json.loads(path.read_text())["manifest"] for path in run.glob("*/*/manifest.json")}
    assert len(manifests) == STEPS
    return {
        f"{path.parent.name}/{name}": digest
        for path, manifest in manifests.items()
        for name, digest in manifest["files"].items()
        if name.endswith(".safetensors")
    }


def check(folder: Path, options: dict[str, str], ranks: int, **variables: str) -> None:
    settings = f"--save_interval 1 --keep_last {STEPS} --no_export --deterministic"
    runs = {
        f"{name}{suffix}": f"{flags('', 'delayed', gpus=ranks)} {settings} {option} {save}"
        for name, option in options.items()
        for suffix, save in (("", "--async_save"), (" at once", "--no_async_save"))
    }
    launch(folder, runs, ranks, **DETERMINISTIC, **variables)
    for name in options:
        assert files(folder / name) == files(folder / f"{name} at once"), name


def test_all_checkpoints_are_those_of_synchronous_saves(tmp_path):
    check(tmp_path, OPTIONS, 1)


def test_all_checkpoints_of_two_ranks_are_those_of_synchronous_saves(tmp_path):
    check(tmp_path, SHARDED, 2, SHARE_GPU="1")


@pytest.mark.parametrize("waits", [True, False])
def test_the_update_waits_for_a_slow_copy(waits):
    """Without the wait the copy would have the updated weights: this shows that the copy is late."""
    stager, weights = Stager(DEVICE), torch.ones(2**22, device=DEVICE)
    with torch.cuda.stream(stager.stream):
        torch.cuda._sleep(10**9)
    staged = stager.stage({"weights": weights})
    assert not stager.copied.query()
    if waits:
        stager.finish_copies()
    assert not stager.copied.query()  # the host does not wait
    weights.add_(1)
    assert (staged.result()["weights"] == (1 if waits else 2)).all()
