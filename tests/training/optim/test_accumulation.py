"""Sums of gradients over micro-batches, in FP32 beside BF16 parameters."""

import pytest
import torch
from torch import nn

from training.config import config_from_dict
from training.optim.accumulation import GatheredSums, MicroBatchSums, gradient_of
from training.optim.adamw import FusedAdamW
from training.parallel.strategies import Strategy

MICRO_BATCHES = 16


class Model(nn.Module):
    """Two BF16 weights, the second used by even micro-batches alone, as an expert may be."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.always = nn.Parameter(torch.randn(8, 8).bfloat16())
        self.seldom = nn.Parameter(torch.randn(8, 8).bfloat16())

    def forward(self, x, use_both):
        y = x @ self.always
        return ((y @ self.seldom if use_both else y).float() ** 2).sum()


def adamw(model):
    settings = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}
    groups = [{"params": list(model.parameters())}]
    return FusedAdamW(groups, **settings, master_weights=True, moment_dtype=torch.float32)


def strategy(steps, dtype="fp32"):
    cfg = config_from_dict({"gradient_accumulation_steps": steps, "grad_reduce_dtype": dtype})
    return Strategy(torch.device("cpu"), cfg)


def run_micro_batches(model, chosen=None, *, scale=1.0):
    """Backward of all micro-batches; the exact gradient of each as autograd rounds it, summed in FP32."""
    sums = {name: torch.zeros(8, 8) for name, _ in model.named_parameters()}
    for i in range(MICRO_BATCHES):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(i)).bfloat16()
        uses_both = i % 2 == 0
        loss = model(x, uses_both) * scale
        used = {n: p for n, p in model.named_parameters() if uses_both or n == "always"}
        for name, grad in zip(used, torch.autograd.grad(loss, list(used.values())), strict=True):
            sums[name] += grad.float()
        if chosen:
            ends = {"first": i == 0, "last": i == MICRO_BATCHES - 1}
            with chosen.accumulating(model, **ends):
                assert model.first_micro_batch is (i == 0)
                chosen.backward(model, model(x, uses_both) * scale)
            assert model.first_micro_batch is None
    return sums


def test_micro_batches_add_up_in_fp32():
    model, chosen = Model(), strategy(MICRO_BATCHES)
    chosen.wrap(model, adamw(model))
    expected = run_micro_batches(model, chosen)
    for name, parameter in model.named_parameters():
        assert parameter.grad is None and gradient_of(parameter).dtype == torch.float32
        assert torch.equal(gradient_of(parameter), expected[name])


def test_bf16_sums_lose_what_fp32_keeps():
    model, chosen = Model(), strategy(MICRO_BATCHES, "bf16")
    chosen.wrap(model, adamw(model))
    expected = run_micro_batches(model, chosen)
    found = gradient_of(model.always)
    assert found.dtype == torch.bfloat16
    assert 0 < (found.float() - expected["always"]).norm() / expected["always"].norm() < 2e-2


def test_the_step_takes_the_sums_and_forgets_them():
    model, chosen = Model(), strategy(MICRO_BATCHES)
    wrapped, optimizer = chosen.wrap(model, adamw(model))
    for _ in range(2):  # the second step must not see the first one's sums
        expected = run_micro_batches(model, chosen)
        twin = Model()
        twin.load_state_dict(model.state_dict())
        reference = adamw(twin)
        for name, parameter in twin.named_parameters():
            parameter.main_grad = expected[name]
            old = optimizer.state[dict(model.named_parameters())[name]]
            reference.state[parameter] = {key: value.clone() for key, value in old.items()}
        reference.steps.copy_(optimizer.steps)
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in expected.values()]))
        outcome = chosen.step(wrapped, optimizer, usable=torch.tensor(True), max_norm=0.0)
        reference.step()
        assert outcome.taken and torch.allclose(outcome.grad_norm, norm)
        assert all(gradient_of(p) is None for p in model.parameters())
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_a_step_that_is_not_finite_leaves_no_sums():
    model, chosen = Model(), strategy(MICRO_BATCHES)
    wrapped, optimizer = chosen.wrap(model, adamw(model))
    before = {name: p.clone() for name, p in model.named_parameters()}
    run_micro_batches(model, chosen, scale=float("nan"))
    assert not chosen.step(wrapped, optimizer, usable=torch.tensor(True), max_norm=1.0).taken
    assert all(gradient_of(p) is None for p in model.parameters())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


class TELike(nn.Module):
    """Says what TE's modules say; `weight` is the GEMM's."""

    fuse_wgrad_accumulation = True

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
        self.layer_norm_weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_tes_weights_stay_and_are_told_when_to_start_anew(dtype):
    module = TELike()
    sums = MicroBatchSums(module, dtype)
    assert module.weight.main_grad.dtype == dtype and not module.weight.main_grad.any()
    for first in (True, False):
        sums.begin_micro_batch(first=first, last=not first)
        assert module.weight.overwrite_main_grad is first
    module.layer_norm_weight.sum().backward()
    assert gradient_of(module.layer_norm_weight).dtype == dtype
    sums.clear()
    assert gradient_of(module.layer_norm_weight) is None and gradient_of(module.weight) is not None


def test_one_micro_batch_needs_no_sums():
    model, chosen = Model(), strategy(1)
    chosen.wrap(model, adamw(model))
    model(torch.ones(4, 8).bfloat16(), True).backward()
    assert all(p.grad is not None and gradient_of(p) is p.grad for p in model.parameters())


class LayerNormLinear(TELike):
    pass


def test_a_module_that_would_not_ask_for_its_sum_is_left_alone():
    model = nn.ModuleList([LayerNormLinear(), TELike()])
    GatheredSums(model, torch.float32).begin_micro_batch(first=True, last=False)
    assert [module.fuse_wgrad_accumulation for module in model] == [False, True]
