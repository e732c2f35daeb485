"""AdamW over BF16 weights with FP32 masters, in its plain form, against torch's over FP32 weights."""

import pytest
import torch

from training.optim.adamw import FusedAdamW, merge_master, split_master
from training.optim.optimizer import (
    BF16_MOMENTS_LONGEST_BETA2,
    build_optimizer,
    optimizer_state,
    optimizer_steps,
    plan_optimizer,
    set_optimizer_steps,
    step_if,
)
from training.optim.settings import OptimConfig
from training.precision.settings import PrecisionConfig

LOW = PrecisionConfig(moment_dtype="bf16")
NONE = PrecisionConfig(master_weights="none")


def ours(weight: torch.Tensor, cfg: OptimConfig, precision=None) -> tuple[torch.nn.Module, FusedAdamW]:
    model = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.copy_(weight)
    plan = plan_optimizer(precision or PrecisionConfig(), on_gpu=True)
    return model, build_optimizer(model, cfg, plan)


def master(model: torch.nn.Module, optimizer: FusedAdamW) -> torch.Tensor:
    return merge_master(model.weight.detach(), optimizer.state[model.weight]["master_param"])


def test_masters_follow_torchs_adamw_over_fp32_weights():
    torch.manual_seed(0)
    start = (torch.randn(40, 30) * 0.02).bfloat16()
    cfg = OptimConfig(learning_rate=1e-5, weight_decay=0.1)
    model, optimizer = ours(start, cfg)
    reference = torch.nn.Parameter(start.float())
    theirs = torch.optim.AdamW([reference], lr=1e-5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(30):
        grad = torch.randn(40, 30).bfloat16() * 10.0 ** (step % 5 - 4)
        model.weight.grad, reference.grad = grad, grad.float()
        optimizer.step()
        theirs.step()
    moved = (reference - start.float()).abs()
    assert moved.min() > 0 and (model.weight == start).any(), "some of it stands in the remainders alone"
    # Half a unit in the last place of the largest weights, each step.
    assert (master(model, optimizer) - reference).abs().max() < 30 * 2**-28
    assert torch.equal(split_master(master(model, optimizer))[0], model.weight)


@pytest.mark.parametrize(("beta2", "left_of_it"), [(BF16_MOMENTS_LONGEST_BETA2, 0.05), (0.999, 1.0)])
def test_a_second_moment_in_bf16_falls_up_to_the_beta2_that_is_warned_of(beta2, left_of_it):
    """After 300 steps without gradient; of 0.999 it should be 0.74."""
    model, optimizer = ours(torch.ones(4, 4).bfloat16(), OptimConfig(adam_beta2=beta2), LOW)
    for step in range(300):
        model.weight.grad = torch.full((4, 4), float(step == 0), dtype=torch.bfloat16)
        optimizer.step()
    left = optimizer.state[model.weight]["exp_avg_sq"].float() / (1 - beta2)
    assert left.mean().item() == pytest.approx(left_of_it, rel=0.2)


def test_without_masters_small_updates_are_lost_and_with_them_kept():
    start = torch.full((4, 4), 0.02).bfloat16()
    for precision, lost in ((NONE, True), (PrecisionConfig(), False)):
        model, optimizer = ours(start, OptimConfig(learning_rate=1e-6, weight_decay=0.0), precision)
        for _ in range(200):  # 2e-4 in all; BF16's step at 0.02 is 1.2e-4
            model.weight.grad = torch.ones(4, 4, dtype=torch.bfloat16)
            optimizer.step()
        assert torch.equal(model.weight, start) == lost


@pytest.mark.parametrize("moments", [PrecisionConfig(), LOW])
def test_a_scaled_step_is_the_step_of_scaled_gradients(moments):
    start, grad = torch.randn(8, 8).bfloat16(), torch.randn(8, 8).bfloat16()
    one, other = (ours(start, OptimConfig(learning_rate=1e-2), moments) for _ in range(2))
    one[0].weight.grad, other[0].weight.grad = grad, grad * 0.25  # exact in BF16
    step_if(one[1], taken=torch.tensor(True), scale=torch.tensor(0.25), gradients=[grad])
    other[1].step()
    assert torch.equal(master(*one), master(*other))
    dtype = torch.bfloat16 if moments is LOW else torch.float32
    for name, value in optimizer_state(one[1], one[0]).items():
        assert value.dtype == (torch.int16 if "master" in name else dtype)
        assert torch.equal(value, optimizer_state(other[1], other[0])[name])


def test_a_step_not_taken_changes_nothing_and_is_not_counted():
    start = torch.randn(8, 8).bfloat16()
    model, optimizer = ours(start, OptimConfig(learning_rate=1e-2))
    model.weight.grad = torch.full((8, 8), torch.nan, dtype=torch.bfloat16)
    nan = torch.tensor(torch.nan)
    step_if(optimizer, taken=torch.tensor(False), scale=nan, gradients=[model.weight.grad])
    assert torch.equal(model.weight, start) and optimizer_steps(optimizer) == 0
    assert not any(value.any() for value in optimizer_state(optimizer, model).values())
    model.weight.grad = torch.ones(8, 8).bfloat16()
    optimizer.step()
    # The first step of Adam is the learning rate, whatever the gradient: bias correction counts from 1.
    torch.testing.assert_close(master(model, optimizer), start.float() * (1 - 1e-4) - 1e-2)
    assert optimizer_steps(optimizer) == 1


def test_steps_are_restored():
    model, optimizer = ours(torch.zeros(2, 2), OptimConfig())
    set_optimizer_steps(optimizer, 7)
    model.weight.grad = torch.ones(2, 2).bfloat16()
    optimizer.step()
    assert optimizer_steps(optimizer) == 8


def test_a_parameter_in_fp32_is_its_own_master():
    """As routers of some mixtures of experts are, beside BF16."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 8))
    expected = torch.nn.Parameter(weight.detach().clone())
    settings = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}
    own = FusedAdamW([{"params": [weight]}], **settings, master_weights=True, moment_dtype=torch.float32)
    torchs = torch.optim.AdamW([expected], **settings, weight_decay=0.0)
    for _ in range(3):
        weight.grad = torch.randn_like(weight)
        expected.grad = weight.grad.clone()
        own.step()
        torchs.step()
    torch.testing.assert_close(weight, expected)
    assert "master_param" not in own.state[weight]
