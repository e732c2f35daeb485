"""AdamW on BF16 weights with FP32 masters, in its plain form, against torch's on FP32 weights."""

from pathlib import Path

import pytest
import torch
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.optim import optimizer as optim
from fp8_suite.training.optim.adamw import MasterAdamW, merge_master, split_master
from fp8_suite.training.optim.settings import OptimConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.children import run_ranks


def build(weight, cfg=None, precision=None, mesh=None) -> tuple[torch.nn.Module, MasterAdamW]:
    model = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.copy_(weight)
    if mesh:
        fully_shard(model, mesh=mesh)
    spec = optim.choose_optimizer(config_from_dict(precision or {}), "single", on_gpu=True)
    return model, optim.build_optimizer(model, cfg or OptimConfig(learning_rate=1e-2), spec)


def master(model, optimizer) -> torch.Tensor:
    return merge_master(model.weight.detach(), optimizer.state[model.weight]["master_param"])


def test_masters_follow_torchs_adamw_on_fp32_weights():
    torch.manual_seed(0)
    start = (torch.randn(40, 30) * 0.02).bfloat16()
    model, optimizer = build(start, OptimConfig(learning_rate=1e-5, weight_decay=0.1))
    reference = torch.nn.Parameter(start.float())
    torchs = torch.optim.AdamW([reference], lr=1e-5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(30):
        grad = torch.randn(40, 30).bfloat16() * 10.0 ** (step % 5 - 4)
        model.weight.grad, reference.grad = grad, grad.float()
        optimizer.step()
        torchs.step()
    moved = (reference - start.float()).abs()
    assert moved.min() > 0 and (model.weight == start).any(), "some updates are in the remainders only"
    # Half a unit in the last place of the largest weights, at each step.
    assert (master(model, optimizer) - reference).abs().max() < 30 * 2**-28
    assert torch.equal(split_master(master(model, optimizer))[0], model.weight)


@pytest.mark.parametrize("settings", [{}, {"offload_optimizer": True}], ids=["", "offload"])
def test_masters_that_are_spread_round_to_their_weights_and_follow_small_updates(settings):
    start = torch.tensor([0.02, -0.02, 0.0, 2.0**-126, 1.0]).bfloat16().repeat(4096, 2)
    learning_rate = OptimConfig(learning_rate=1e-5, weight_decay=0.0)
    (model, optimizer), (twin, unspread) = (build(start, learning_rate, settings) for _ in range(2))
    optim.spread_masters(optimizer, model, seed=1)
    if optimizer.host:
        optimizer.host.wait_until_locked()
    optim.optimizer_state(unspread, twin)
    optim.spread_masters(unspread, twin, seed=1, exact={"weight"})
    assert torch.equal(master(twin, unspread), start.float())
    spread = master(model, optimizer)
    assert torch.equal(split_master(spread)[0], start) and torch.equal(model.weight, start)
    assert spread.isfinite().all() and not spread[start == 0].any()
    low = optimizer.state[model.weight]["master_param"][:, 0].float()
    assert low.min() < -32000 and low.max() > 32000 and low.mean().abs() < 2000
    for parameter, stepped in ((model.weight, optimizer), (twin.weight, unspread)):
        parameter.grad = torch.ones_like(start)
        stepped.step()
    assert torch.equal(twin.weight[:, 0], start[:, 0]), "an update below half the spacing"
    moved = (model.weight.float() - start.float())[:, [0, 1, 5, 6]].mean()
    assert moved.item() == pytest.approx(-1e-5, rel=0.1)


def test_masters_are_spread_alike_in_every_sharding(tmp_path):
    run_ranks(spread_shards, tmp_path)


def spread_shards(rank: int, folder: Path) -> None:
    lows = []
    for mesh in (None, init_device_mesh("cpu", (2,))):
        model, optimizer = build(torch.ones(5, 3).bfloat16(), mesh=mesh)
        optim.spread_masters(optimizer, model, seed=1)
        lows.append(optimizer.state[model.weight]["master_param"])
    whole, shards = lows
    assert torch.equal(shards.to_local(), whole.chunk(2)[rank])
    assert len(whole.unique()) > 5


def test_parameters_in_fp32_are_not_spread():
    model = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
    model.bias = torch.nn.Parameter(torch.ones(8))
    spec = optim.choose_optimizer(config_from_dict({}), "single", on_gpu=True)
    optimizer = optim.build_optimizer(model, OptimConfig(), spec)
    optim.spread_masters(optimizer, model, seed=1)
    assert torch.equal(model.bias, torch.ones(8)) and not torch.equal(master(model, optimizer), model.weight)


def test_a_skipped_step_changes_nothing_and_is_not_counted():
    start = torch.randn(8, 8).bfloat16()
    model, optimizer = build(start)
    nan = torch.tensor(torch.nan)
    model.weight.grad = nan.bfloat16().expand(8, 8)
    optim.step_if(optimizer, apply=torch.tensor(False), scale=nan)
    assert torch.equal(model.weight, start) and optim.optimizer_steps(optimizer) == 0
    assert not any(value.any() for value in optim.optimizer_state(optimizer, model).values())
    model.weight.grad = torch.ones(8, 8).bfloat16()
    optimizer.step()
    # Adam's first step is the learning rate, whatever the gradient: bias correction counts from 1.
    torch.testing.assert_close(master(model, optimizer), start.float() * (1 - 1e-4) - 1e-2)
    assert optim.optimizer_steps(optimizer) == 1
    optim.set_optimizer_steps(optimizer, 7)
    optimizer.step()
    assert optim.optimizer_steps(optimizer) == 8


def test_a_parameter_in_fp32_is_its_own_master():
    """Some mixtures of experts have FP32 routers among BF16 weights."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 8))
    expected = torch.nn.Parameter(weight.detach().clone())
    settings = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}
    dtypes = {"master_weights": True, "moment_dtypes": ("fp32", "fp32")}
    fused = MasterAdamW([{"params": [weight]}], **settings, **dtypes)
    torchs = torch.optim.AdamW([expected], **settings, weight_decay=0.0)
    for _ in range(3):
        weight.grad = torch.randn_like(weight)
        expected.grad = weight.grad.clone()
        fused.step()
        torchs.step()
    torch.testing.assert_close(weight, expected)
    assert "master_param" not in fused.state[weight]


def test_masters_are_split_into_the_nearest_bf16_and_an_exact_remainder():
    """Any 32 bits; around a half, where BF16 rounds up; both signs; down to zero and up to infinity."""
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(0))
    edges = [0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F80FFFF, 0, 1, 0x8000, 0x7F7FFFFF]
    masters = torch.cat([bits, torch.tensor(edges), torch.tensor(edges) - 2**31]).to(torch.int32)
    weight, remainder = split_master(masters.view(torch.float32))
    assert (weight.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(merge_master(weight, remainder).view(torch.int32), masters)
    up = 1 + 2**-7  # BF16 numbers after 1 are 2**-7 apart; a half rounds up, as in TE
    assert weight[4096:4101].tolist() == [1.0, 1.0, up, up, up] and remainder[4098] == -(2**15)
    columns = torch.randn(4, 6).t()
    assert torch.equal(merge_master(*split_master(columns)), columns), "any layout"
