"""Saves in the background hold the same bits as synchronous ones, whatever the update does meanwhile."""

import os
from pathlib import Path

import pytest
import torch
from fp8_suite.training.checkpoint.manifest import DamagedCheckpoint
from fp8_suite.training.checkpoint.staging import Stager
from fp8_suite.training.checkpoint.store import Checkpoints
from safetensors.torch import load_file

from tests.gpu.models import DEVICE
from tests.gpu.test_multi_gpu import DETERMINISTIC, PRECISIONS, STEPS, flags, launch

pytestmark = pytest.mark.gpu
KINDS = ("--async_save", "--no_async_save")
OPTIONS = {
    "delayed": "",
    "current": f"--mixed_precision {PRECISIONS['current']} --moment_dtype fp8",
    "offload": "--offload_optimizer --moment_dtype fp8",
    "weights": "--offload_optimizer --fp8_weights",
    "layers": "--no_use_te --mixed_precision bf16",
}
SHARDED = {
    "ddp": "",
    "fsdp_full": "",
    "fsdp_grad": "--offload_optimizer",
    "hsdp": "",
}


def saved(run: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all checkpoints but the RNG state, which goes on from run to run."""
    folders = sorted(run.glob("checkpoints/step_*"))
    assert len(folders) == STEPS
    return {
        f"{file.parent.name}/{file.name}/{key}": tensor
        for folder in folders
        for file in sorted(folder.glob("*.safetensors"))
        for key, tensor in load_file(file).items()
        if not key.startswith("rng/")
    }


def check(folder: Path, runs: dict[str, str], ranks: int, **variables: str) -> None:
    """Execute each run with both kinds of saves, and compare their checkpoints."""
    settings = f"--save_interval 1 --keep_last {STEPS} --no_export --deterministic"
    both = {f"{name}{kind}": f"{flags} {settings} {kind}" for name, flags in runs.items() for kind in KINDS}
    launch(folder, both, ranks, **DETERMINISTIC, **variables)
    for name in runs:
        actual, expected = (saved(folder / f"{name}{kind}") for kind in KINDS)
        assert actual.keys() == expected.keys() and len(expected) > STEPS * 20
        assert [key for key in expected if not torch.equal(actual[key], expected[key])] == [], name


def test_all_checkpoints_are_those_of_synchronous_saves(tmp_path):
    check(tmp_path, {name: f"{flags('', 'delayed', gpus=1)} {option}" for name, option in OPTIONS.items()}, 1)


def test_a_checkpoint_is_verified_while_it_is_loaded_onto_the_gpu(tmp_path):
    def values(n: int) -> torch.Tensor:
        generator = torch.Generator(DEVICE).manual_seed(n)
        return torch.randint(0, 256, (5, 2**24 - n), dtype=torch.uint8, device=DEVICE, generator=generator)

    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.file_bytes = 2**28
    path = checkpoints.save(1, {f"tensor.{n}": values(n) for n in range(8)}, {})
    loaded = {f"tensor.{n}": torch.zeros_like(values(n)) for n in range(8)}
    loaded["tensor.1"] = torch.zeros(2**24 - 1, 5, dtype=torch.uint8, device=DEVICE).t()  # strided
    checkpoints.load(path, loaded)
    assert all(torch.equal(loaded[f"tensor.{n}"], values(n)) for n in range(8))
    with open(max(path.glob("*.safetensors")), "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    with pytest.raises(DamagedCheckpoint, match="does not match its checksum"):
        checkpoints.load(path, loaded)


def test_all_checkpoints_of_two_ranks_are_those_of_synchronous_saves(tmp_path):
    runs = {mode: f"{flags(mode, 'current', gpus=2)} {option}" for mode, option in SHARDED.items()}
    check(tmp_path, runs, 2, SHARE_GPU="1")


@pytest.mark.parametrize("waits", [True, False])
def test_the_update_waits_for_a_slow_copy(waits):
    """Without the wait the copy would have the updated weights: this shows that the copy is late."""
    stager, weights = Stager(DEVICE), torch.zeros(2**22, device=DEVICE)
    weights.add_(1)  # the first launch of a kernel may wait for the GPU
    with torch.cuda.stream(stager.stream):
        torch.cuda._sleep(10**9)
    staged = stager.stage({"weights": weights})
    assert not stager.copied.query()
    if waits:
        stager.finish_copies()
    assert not stager.copied.query()  # the host does not wait
    weights.add_(1)
    assert (staged.result()["weights"] == (1 if waits else 2)).all()
