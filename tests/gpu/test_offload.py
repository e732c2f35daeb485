"""Optimizer state in pinned host memory: the same bits as on the GPU, and less GPU memory."""

import gc
from pathlib import Path

import pytest
import torch
from fp8_suite.training.optim import moments, offload
from fp8_suite.training.optim.optimizer import OptimizerSpec, build_optimizer, optimizer_state, step_if
from fp8_suite.training.optim.pinned import pinned
from fp8_suite.training.optim.settings import OptimConfig
from fp8_suite.training.precision.settings import parse_moment_dtype
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from tests.gpu.models import DEVICE
from tests.gpu.test_run import SMALL, losses, train

pytestmark = pytest.mark.gpu


def build(formats: str, *, offloaded: bool, masters: bool = True, rows: int = 1001):
    """Return matrices with and without blocks, and vectors, with their optimizer."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(640, rows), torch.nn.Linear(100, 37), torch.nn.LayerNorm(4097)
    model = torch.nn.Sequential(*layers).bfloat16().to(DEVICE)
    spec = OptimizerSpec("fused_adamw", torch.bfloat16, masters, parse_moment_dtype(formats), offloaded)
    return model, build_optimizer(model, OptimConfig(learning_rate=1e-2), spec)


def step(model, optimizer, number: int) -> None:
    generator = torch.Generator(DEVICE).manual_seed(number)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, device=DEVICE).bfloat16()
    apply, scale = torch.tensor(number != 3, device=DEVICE), torch.tensor(0.5, device=DEVICE)
    step_if(optimizer, apply=apply, scale=scale)
    optimizer.zero_grad()


def values(model, optimizer) -> dict[str, torch.Tensor]:
    """Return weights and state on the host."""
    state = optimizer_state(optimizer, model)
    return {name: tensor.cpu() for name, tensor in {**model.state_dict(), **state}.items()}


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        if not torch.equal(tensor, b[name]):
            at = (tensor != b[name]).flatten().nonzero().flatten()
            values, expected = b[name].flatten()[at[:4]].tolist(), tensor.flatten()[at[:4]].tolist()
            print(f"{name}: {len(at)} values differ, at {at[:4].tolist()}: {values} instead of {expected}")
    assert not [name for name, tensor in a.items() if not torch.equal(tensor, b[name])]


@pytest.mark.parametrize("chunk", [7 * moments.BLOCK, 2**16, offload.CHUNK])
@pytest.mark.parametrize("masters", [True, False], ids=["masters", "no-masters"])
@pytest.mark.parametrize("formats", ["fp32", "bf16", "fp8", "fp8,fp16"])
def test_weights_and_state_are_the_same_bits_in_host_memory(formats, masters, chunk, monkeypatch):
    """The host runs ahead: it waits for none of the 8 steps. One of them is skipped."""
    monkeypatch.setattr(offload, "CHUNK", chunk)
    runs = [build(formats, offloaded=offloaded, masters=masters) for offloaded in (False, True)]
    for model, optimizer in runs:
        torch.cuda._sleep(10**8)  # so that kernels start after the host has launched many of them
        for number in range(8):
            step(model, optimizer, number)
    a, b = (values(*run) for run in runs)
    assert_same_bits(a, b)
    state = optimizer_state(runs[1][1], runs[1][0]).values()
    assert all(tensor.is_pinned() and tensor.device.type == "cpu" for tensor in state)


def test_a_step_does_not_wait_for_the_gpu():
    model, optimizer = build("fp8", offloaded=True)
    step(model, optimizer, 0)  # compiles the kernel
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(10**9)
        asleep = torch.cuda.Event()
        asleep.record()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        assert not asleep.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_forked_worker_does_not_separate_the_host_from_the_gpu():
    """After a fork, copy-on-write would give the host another page than the GPU's."""
    memory = pinned(2**24 + 4097)
    for value in range(1, 4):
        workers = iter(DataLoader(range(4), num_workers=2, multiprocessing_context="fork"))
        memory.fill_(value)
        on_gpu = memory.to(DEVICE, non_blocking=True) * 2
        memory.copy_(on_gpu, non_blocking=True)
        torch.cuda.synchronize()
        assert len(list(workers)) == 4
        assert bool((on_gpu == 2 * value).all()) and bool((memory == 2 * value).all())


@pytest.mark.parametrize("formats", ["fp32", "fp8"])
def test_gpu_memory_is_lower_by_the_states_bytes(formats):
    def used(*, offloaded: bool) -> tuple[int, int]:
        gc.collect()
        before = torch.cuda.memory_allocated()
        model, optimizer = build(formats, offloaded=offloaded, rows=50_000)
        step(model, optimizer, 0)
        torch.cuda.synchronize()
        bytes_of_state = sum(tensor.nbytes for tensor in optimizer_state(optimizer, model).values())
        return torch.cuda.memory_allocated() - before, bytes_of_state

    on_gpu, state = used(offloaded=False)
    off_gpu, on_host = used(offloaded=True)
    assert on_host == state > 100e6
    assert on_gpu - off_gpu == pytest.approx(state, rel=0.01)


def checkpoint(folder: Path, step: int) -> dict[str, torch.Tensor]:
    files = sorted((folder / "checkpoints" / f"step_{step:06}").glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("rng/")}


@pytest.mark.parametrize("formats", ["fp32", "fp8"])
def test_a_run_is_bit_for_bit_the_same_and_resumes_with_and_without(tmp_path, formats):
    flags = f"{SMALL} --mixed_precision fp8 --moment_dtype {formats} --no_export"
    runs = {"plain": "", "offloaded": "--offload_optimizer"}
    for name, options in runs.items():
        output = train(tmp_path / name, f"{flags} {options}")
        assert ("moments, offloaded" in output) == (name == "offloaded")
    plain, offloaded = (tmp_path / name for name in runs)
    assert losses(plain) == losses(offloaded)
    expected = checkpoint(plain, 12)
    assert_same_bits(expected, checkpoint(offloaded, 12))
    for origin, options in ((plain, "--offload_optimizer"), (offloaded, "")):
        resumed = tmp_path / f"from-{origin.name}"
        train(resumed, f"{flags} {options} --resume {origin}/checkpoints/step_000006")
        assert losses(resumed) == {at: loss for at, loss in losses(plain).items() if at > 6}
        assert_same_bits(expected, checkpoint(resumed, 12))
    flags = f"{flags} --resume {plain}/checkpoints/step_000006 --moment_dtype fp16"
    for name, options in runs.items():
        train(tmp_path / f"fp16-{name}", f"{flags} {options}")
    assert_same_bits(*(checkpoint(tmp_path / f"fp16-{name}", 12) for name in runs))


def test_masters_of_a_run_from_files_are_spread_alike(tmp_path):
    train(tmp_path / "base", f"{SMALL} --mixed_precision bf16 --max_steps 2 --no_save_checkpoints")
    flags = f"{SMALL} --model_name {tmp_path}/base/export --mixed_precision fp8 --no_export"
    for name, options in (("plain", ""), ("offloaded", "--offload_optimizer")):
        train(tmp_path / name, f"{flags} {options} --max_steps 2 --save_interval 1 --learning_rate 1e-300")
    plain, offloaded = (checkpoint(tmp_path / name, 1) for name in ("plain", "offloaded"))
    assert_same_bits(plain, offloaded)
    masters = [tensor for name, tensor in plain.items() if name.endswith("master_param")]
    assert masters and all(
        low.min() < -30_000 and low.max() > 30_000 for low in masters if low.numel() > 1000
    )
