"""Gradient accumulation in TE's GEMMs, and FP8 weights cast once per step, against single micro-batches."""

from dataclasses import replace

import pytest
import torch
from fp8_suite.te_models.options import NativeOptions
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.optim.accumulation import gradient_of
from fp8_suite.training.optim.optimizer import OptimizerSpec, build_optimizer
from fp8_suite.training.parallel.strategies import Strategy

from tests.gpu.models import DEVICE, batch, build, perturbed, spec
from tests.gpu.test_te_model import bf16, fp8, step

pytestmark = pytest.mark.gpu
STEPS = 3  # micro-batches
SUMS_IN_GEMMS = NativeOptions(fuse_gradient_sums=True)


def optimizer_of(model):
    cfg = config_from_dict({}).optim
    return build_optimizer(model, cfg, OptimizerSpec("fused_adamw", torch.bfloat16, True, ("fp32", "fp32")))


@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("cached", [True, False], ids=["cached", "cast-again"])
@pytest.mark.parametrize("name", [None, "delayed", "current", "block"])
def test_sums_match_those_of_single_micro_batches(name, cached, recompute):
    compare_with_single_micro_batches(spec(), name, cached=cached, recompute=recompute)


@pytest.mark.parametrize(
    ("family", "tied", "name"),
    [
        ("llama", True, "delayed"),
        ("qwen2", False, "delayed"),
        ("qwen2", True, None),
        ("qwen3", True, "current"),
    ],
)
def test_sums_match_for_tied_weights_biases_and_head_norms(family, tied, name, tmp_path):
    model_spec = perturbed(spec(family=family, tied=tied, layers=2), tmp_path)
    compare_with_single_micro_batches(model_spec, name)


@pytest.mark.parametrize("name", [None, "delayed", "block"])
def test_sums_match_in_bf16(name):
    compare_with_single_micro_batches(spec(), name, sums=torch.bfloat16)


def compare_with_single_micro_batches(
    model_spec, name, *, cached=True, recompute=False, sums=torch.float32
) -> None:
    autocast = fp8(name) if name else bf16()
    inputs = [batch([[100, 156]] * 8, packed=True, seed=seed) for seed in range(STEPS)]
    options = {"use_te": True, "packed": True, "recompute": "layer" if recompute else "none"}
    apart = build(model_spec, **options)
    together = build(model_spec, **options, native=replace(SUMS_IN_GEMMS, cache_fp8_weights=cached))
    settings = {"gradient_accumulation_steps": STEPS}
    settings["grad_reduce_dtype"] = {torch.float32: "fp32", torch.bfloat16: "bf16"}[sums]
    chosen = Strategy("single", DEVICE, config_from_dict(settings))
    optimizer = optimizer_of(together)
    wrapped = chosen.wrap(together, optimizer)
    names = {id(p): name for name, p in together.named_parameters()}
    for _ in range(2):  # calibrate delayed scaling, as in a run
        step(apart, inputs[0], autocast)
        with chosen.accumulating(wrapped, first=True, last=True):
            with autocast():
                loss = wrapped(**inputs[0]).loss / (inputs[0]["labels"] != -100).sum()
            chosen.backward(wrapped, loss)
        chosen.discard(wrapped, optimizer)
    for turn in range(2):  # with a weight update in between
        expected = {n: torch.zeros_like(p, dtype=torch.float32) for n, p in apart.named_parameters()}
        for i, one in enumerate(inputs):
            alone, grads = step(apart, one, autocast)
            for key, grad in grads.items():
                expected[key] += grad
            with chosen.accumulating(wrapped, first=i == 0, last=i == STEPS - 1):
                with autocast():
                    loss = wrapped(**one).loss / (one["labels"] != -100).sum()
                chosen.backward(wrapped, loss)
            assert loss.item() == pytest.approx(alone, rel=1e-3)
        for parameter in together.parameters():
            total, key = gradient_of(parameter), names[id(parameter)]
            assert parameter.grad is None and total.dtype == sums
            error = (total.float() - expected[key]).norm() / expected[key].norm()
            assert error < 1e-2, f"turn {turn}, {key}: {error:.4f}"
        chosen.discard(wrapped, optimizer)
        with torch.no_grad():
            for model in (apart, together):
                for parameter in model.parameters():
                    parameter.mul_(0.5)  # within the range of the delayed scales


def test_a_step_with_gradients_accumulated_by_te_is_bit_for_bit_the_same():
    inputs = [batch([[100, 156]] * 8, packed=True, seed=seed) for seed in range(STEPS)]
    model = build(spec(), use_te=True, packed=True, native=SUMS_IN_GEMMS)
    twin = build(spec(), use_te=True, packed=True)
    chosen = Strategy("single", DEVICE, config_from_dict({"gradient_accumulation_steps": STEPS}))
    optimizer = optimizer_of(model)
    wrapped = chosen.wrap(model, optimizer)
    for i, one in enumerate(inputs):
        with chosen.accumulating(wrapped, first=i == 0, last=i == STEPS - 1):
            chosen.backward(wrapped, wrapped(**one).loss / 1000)
    for parameter, twin_parameter in zip(model.parameters(), twin.parameters(), strict=True):
        twin_parameter.main_grad = gradient_of(parameter).clone()
    assert chosen.step(wrapped, optimizer, usable=torch.tensor(True, device=DEVICE), max_norm=0.0).applied
    optimizer_of(twin).step()
    moved = [torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True)]
    assert all(moved)


def test_a_step_is_not_affected_by_a_skipped_one():
    inputs = [batch([[100, 156]] * 8, packed=True, seed=seed) for seed in range(STEPS)]
    model = build(spec(), use_te=True, packed=True, native=SUMS_IN_GEMMS)
    chosen = Strategy("single", DEVICE, config_from_dict({"gradient_accumulation_steps": STEPS}))
    optimizer = optimizer_of(model)
    wrapped = chosen.wrap(model, optimizer)
    before = {name: p.clone() for name, p in model.named_parameters()}
    for factor in (float("nan"), 1.0):
        for i, one in enumerate(inputs):
            with chosen.accumulating(wrapped, first=i == 0, last=i == STEPS - 1):
                chosen.backward(wrapped, wrapped(**one).loss * factor)
        usable = torch.tensor(True, device=DEVICE)
        taken = chosen.step(wrapped, optimizer, usable=usable, max_norm=1.0).applied.item()
        assert taken == (factor == 1.0)
        moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
        assert all(p.isfinite().all() for p in model.parameters())
        # Norms start at 1, where a step is less than half of BF16's spacing, so they do not change.
        assert moved == ({name for name, p in before.items() if p.ndim == 2} if taken else set())
