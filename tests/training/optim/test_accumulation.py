"""Sums of gradients over micro-batches, apart from BF16 parameters."""

import torch
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.optim.accumulation import gradient_of
from fp8_suite.training.optim.adamw import MasterAdamW
from fp8_suite.training.parallel.strategies import Strategy
from torch import nn

MICRO_BATCHES = 16


class Model(nn.Module):
    """Two BF16 weights; only even micro-batches use the second, as an expert."""

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
    return MasterAdamW(groups, **settings, master_weights=True, moment_dtypes=("fp32", "fp32"))


def wrapped(model, steps=MICRO_BATCHES):
    cfg = config_from_dict({"gradient_accumulation_steps": steps})
    strategy = Strategy("single", torch.device("cpu"), cfg)
    optimizer = adamw(model)
    strategy.wrap(model, optimizer)
    return strategy, optimizer


def run_micro_batches(model, strategy, *, scale=1.0):
    """Run backward of all micro-batches; returns autograd's gradients of each, summed in FP32, by name."""
    sums = {name: torch.zeros(8, 8) for name, _ in model.named_parameters()}
    for i in range(MICRO_BATCHES):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(i)).bfloat16()
        use_both = i % 2 == 0
        used = {n: p for n, p in model.named_parameters() if use_both or n == "always"}
        grads = torch.autograd.grad(model(x, use_both) * scale, list(used.values()))
        for name, grad in zip(used, grads, strict=True):
            sums[name] += grad.float()
        with strategy.accumulating(model, first=i == 0, last=i == MICRO_BATCHES - 1):
            strategy.backward(model, model(x, use_both) * scale)
    return sums


def test_a_step_uses_the_sums_or_is_skipped_and_frees_them():
    model = Model()
    strategy, optimizer = wrapped(model)
    before = [p.clone() for p in model.parameters()]
    run_micro_batches(model, strategy, scale=float("nan"))
    strategy.step(model, optimizer, usable=torch.tensor(True), max_norm=1.0)
    assert all(map(torch.equal, model.parameters(), before)), "a step that is not finite is skipped"
    reference = adamw(twin := Model())
    for _ in range(2):  # no step contains sums of the one before
        expected = run_micro_batches(model, strategy)
        assert all(p.grad is None and gradient_of(p).dtype == torch.float32 for p in model.parameters())
        for name, parameter in twin.named_parameters():
            parameter.main_grad = expected[name]
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in expected.values()]))
        outcome = strategy.step(model, optimizer, usable=torch.tensor(True), max_norm=0.0)
        reference.step()
        assert torch.allclose(outcome.grad_norm, norm)
        assert all(gradient_of(p) is None for p in model.parameters())
        assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_one_micro_batch_needs_no_sums():
    wrapped(model := Model(), steps=1)
    model(torch.ones(4, 8).bfloat16(), True).backward()
    assert all(p.grad is not None and gradient_of(p) is p.grad for p in model.parameters())
