"""Parameter groups, schedules, optimizer choice and state."""

import pytest
import torch

from te_models.build import build_model, plan_model
from te_models.options import BuildOptions
from training.optim.adamw import merge_master, split_master
from training.optim.optimizer import (
    build_optimizer,
    learning_rate,
    optimizer_state,
    optimizer_steps,
    parameter_groups,
    plan_optimizer,
    step_if,
)
from training.optim.settings import OptimConfig
from training.precision.settings import PrecisionConfig


def test_only_norms_and_biases_are_spared_weight_decay():
    plan = plan_model("tiny-llama", init="auto", use_te=False)
    on_cpu = {"dtype": torch.float32, "device": torch.device("cpu")}
    model = build_model(plan, BuildOptions(te_backend=None, packed=True, max_positions=8, **on_cpu))
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, plain = parameter_groups(model.parameters(), 0.1)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) + len(plain["params"]) == len(names)
    assert {"norm" in names[id(p)] for p in plain["params"]} == {True}
    assert not any("norm" in names[id(p)] for p in decayed["params"])
    biased = torch.nn.Linear(4, 4)
    assert parameter_groups(biased.parameters(), 0.1)[1]["params"] == [biased.bias]


@pytest.mark.parametrize(
    ("scheduler", "step", "expected"),  # 100 steps, 10 of warm-up, peak 1, floor 0.1; computed by hand
    [
        ("cosine", 0, 0.1),
        ("cosine", 9, 1.0),
        ("cosine", 10, 1.0),
        ("cosine", 55, 0.55),
        ("cosine", 100, 0.1),
        ("cosine", 500, 0.1),
        ("linear", 55, 0.55),
        ("linear", 32, 0.78),
        ("constant", 99, 1.0),
    ],
)
def test_schedules(scheduler, step, expected):
    cfg = OptimConfig(learning_rate=1.0, lr_scheduler=scheduler, min_lr_ratio=0.1, num_warmup_steps=10)
    assert learning_rate(step, cfg, 100) == pytest.approx(expected)


def test_warmup_ratio_and_its_override():
    cfg = OptimConfig(learning_rate=1.0, warmup_ratio=0.2, lr_scheduler="constant")
    assert [learning_rate(s, cfg, 10) for s in range(3)] == [0.5, 1.0, 1.0]
    cfg = OptimConfig(learning_rate=1.0, warmup_ratio=0.25, lr_scheduler="constant")
    assert learning_rate(2, cfg, 10) == 1.0 and learning_rate(1, cfg, 10) == pytest.approx(2 / 3)  # 2.5 -> 3
    assert learning_rate(0, OptimConfig(learning_rate=1.0, num_warmup_steps=0), 10) == 1.0


def test_masters_are_fp32_wherever_te_is_missing():
    plan = plan_optimizer(PrecisionConfig(), on_gpu=False)
    assert (plan.kind, plan.parameter_dtype, plan.master_weights) == ("torch_adamw", torch.float32, True)
    plan = plan_optimizer(PrecisionConfig(), on_gpu=True)
    assert (plan.kind, plan.parameter_dtype, plan.master_weights) == ("fused_adamw", torch.bfloat16, True)
    plan = plan_optimizer(PrecisionConfig(master_weights="none", moment_dtype="bf16"), on_gpu=False)
    assert (plan.parameter_dtype, plan.master_weights) == (torch.bfloat16, False)
    plan = plan_optimizer(PrecisionConfig(master_weights="none", moment_dtype="bf16"), on_gpu=True)
    assert (plan.kind, plan.master_weights, plan.moment_dtype) == ("fused_adamw", False, torch.bfloat16)
    assert plan_optimizer(PrecisionConfig(mixed_precision="fp32"), on_gpu=True).kind == "torch_adamw"
    with pytest.raises(ValueError, match="--moment_dtype bf16"):
        plan_optimizer(PrecisionConfig(moment_dtype="bf16"), on_gpu=False)
    bf16_alone = PrecisionConfig(master_weights="none")
    for where in ({"on_gpu": False}, {"on_gpu": True, "master_home": "cpu"}):
        with pytest.raises(ValueError, match=r"^--master_weights none .* add --moment_dtype bf16, or leave"):
            plan_optimizer(bf16_alone, **where)


def test_state_is_allocated_before_the_first_step_and_live():
    model = torch.nn.Linear(4, 3)
    plan = plan_optimizer(PrecisionConfig(), on_gpu=False)
    optimizer = build_optimizer(model, OptimConfig(), plan)
    state = optimizer_state(optimizer, model)
    assert set(state) == {f"{p}.{s}" for p in ("weight", "bias") for s in ("exp_avg", "exp_avg_sq")}
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert optimizer_steps(optimizer) == 1 and state["weight.exp_avg"].any()
    assert state["weight.exp_avg"] is optimizer_state(optimizer, model)["weight.exp_avg"]


def test_a_fused_step_is_from_gradients_times_the_scale():
    model = torch.nn.Linear(4, 3)
    optimizer = build_optimizer(model, OptimConfig(), plan_optimizer(PrecisionConfig(), on_gpu=False))
    gradients = [torch.ones_like(parameter) for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    step_if(optimizer, taken=torch.tensor(True), scale=torch.tensor(0.25), gradients=gradients)
    first_moment = optimizer_state(optimizer, model)["weight.exp_avg"]
    torch.testing.assert_close(first_moment, torch.full((3, 4), 0.1 * 0.25))


def test_every_setting_reaches_the_optimizer():
    cfg = OptimConfig(learning_rate=0.5, weight_decay=0.2, adam_beta1=0.7, adam_beta2=0.8, adam_epsilon=1e-3)
    plan = plan_optimizer(PrecisionConfig(), on_gpu=False)
    matrix, vector = build_optimizer(torch.nn.Linear(4, 3), cfg, plan).param_groups
    for group in (matrix, vector):
        assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.7, 0.8), 1e-3)
    assert (matrix["weight_decay"], vector["weight_decay"]) == (0.2, 0.0)


def test_masters_are_split_into_bf16_and_its_remainder_exactly():
    """Any 32 bits; around a half, where BF16 rounds up; both signs; down to zero and up to infinity."""
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(0))
    near = torch.tensor(
        [0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F80FFFF, 0, 1, 0x8000, 0x7F7FFFFF]
    )
    master = torch.cat([bits, near, near - 2**31]).to(torch.int32).view(torch.float32)
    weight, remainder = split_master(master)
    assert (weight.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(merge_master(weight, remainder).view(torch.int32), master.view(torch.int32))


def test_the_bf16_half_of_a_master_is_the_nearest_weight():
    one, half_step = 1.0, 2**-8  # BF16 numbers after 1 are 2**-7 apart
    masters = torch.tensor([one, one + 0.9 * half_step, one + half_step, one + 1.5 * half_step, -one])
    weight, remainder = split_master(masters)
    assert weight.tolist() == [1.0, 1.0, 1 + 2**-7, 1 + 2**-7, -1.0], "a half rounds up, as TE has it"
    assert remainder.tolist()[0] == 0 and remainder[2] == -(2**15)
    master = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(split_master(master)[0].float(), master, rtol=2**-8, atol=0)
    columns = torch.randn(4, 6).t()
    assert torch.equal(merge_master(*split_master(columns)), columns), "any layout"
