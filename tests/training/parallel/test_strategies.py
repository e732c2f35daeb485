"""Strategies: gradient norm, sums over ranks and micro-batches, and collectives of a step."""

import copy
import functools
from collections import Counter
from itertools import chain, product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fp8_suite.core.errors import UserError
from fp8_suite.te_models.emulation import layers
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.optim.accumulation import gradient_of
from fp8_suite.training.optim.optimizer import OptimizerSpec, build_optimizer
from fp8_suite.training.optim.settings import OptimConfig
from fp8_suite.training.parallel import gradient_exchange, ranks
from fp8_suite.training.parallel.engines import build_strategy
from fp8_suite.training.parallel.gradient_exchange import ReduceScatter
from fp8_suite.training.parallel.strategies import global_norm
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.children import preload, run_ranks
from tests.training.parallel.sums_in_gemms import sum_in_gemms

preload(__name__)
CPU = torch.device("cpu")
FUSED = OptimizerSpec("fused_adamw", torch.bfloat16, True, ("fp32", "fp32"))


def build(mode: str, **settings):
    chosen = {} if mode == "single" else {"sharding_mode": mode}
    return build_strategy(mode, CPU, config_from_dict(chosen | settings))


def test_the_norm_is_that_of_all_gradients_in_fp32():
    assert global_norm([torch.tensor([[3.0]]), torch.tensor([4.0])]) == 5.0
    many = torch.full((1000,), 1 / 3, dtype=torch.bfloat16)
    norm = global_norm([many])
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, many.double().norm().float(), rtol=1e-6, atol=0)
    with pytest.raises(UserError, match="no parameter has a gradient"):
        global_norm([])


def gradients_of_16_bits_are_summed_in_fp32(rank: int, folder: Path) -> None:
    """Terms that BF16 sums would lose: a large one on one rank, small ones on the others."""
    world_size = dist.get_world_size()
    large = torch.arange(1, 12 * world_size + 1).bfloat16() * 256
    mine = large if rank == 0 else torch.full_like(large, 0.5)
    for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, world_size)):
        output = torch.empty(12, dtype=torch.float32)
        ReduceScatter(fp8=False)(output, mine.clone(), group=dist.group.WORLD, op=op)
        expected = (large.double() + 0.5 * (world_size - 1))[12 * rank : 12 * (rank + 1)] / divisor
        torch.testing.assert_close(output, expected.float(), rtol=1e-7, atol=0)
    # DDP; at every weight another rank has the large term: no order of BF16 sums keeps all small ones.
    strategy = build("ddp")
    model = nn.Linear(12, 1, bias=False, dtype=torch.bfloat16)
    wrapped = strategy.wrap(model, None)
    gradient = torch.where(torch.arange(12) % world_size == rank, 192.0, 0.75).bfloat16()
    with strategy.accumulating(wrapped, first=True, last=True):
        strategy.backward(wrapped, wrapped(gradient).sum())
    assert model.weight.grad.eq(64 + 0.25 + 0.25).all(), model.weight.grad


def gradients_like(rank: int, count: int) -> torch.Tensor:
    """BF16 gradients over many magnitudes, with a block of zeros."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(count, generator=generator) * 10.0 ** torch.linspace(-30, 3, count)
    values[128:256] = 0
    return values.bfloat16()


def gradients_in_fp8_are_exchanged(rank: int, folder: Path) -> None:
    world_size, count = dist.get_world_size(), 3 * 1000  # not a multiple of a block
    terms = torch.stack([gradients_like(sender, count).double() for sender in range(world_size)])
    total, sizes = terms.sum(0), terms.abs().sum(0)
    shard = slice(1000 * rank, 1000 * (rank + 1))
    for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, world_size)):
        gradient_exchange.PARTS = 2 if divisor == 1 else 8  # of two rows and one, or of one row each
        output, counts = torch.empty(1000), Counter()
        with Collectives(counts):
            ReduceScatter(fp8=True)(output, gradients_like(rank, count), group=dist.group.WORLD, op=op)
        assert counts == {"alltoall_base_": 1}
        error = (output * divisor - total[shard]).abs()
        assert (error <= sizes[shard] / 16).all()  # half a step of E4M3
        assert error.norm() < 0.03 * sizes[shard].norm()
    for dtype, error in (("bf16", 0.01), ("fp8", 0.05)):
        average_in_ddp(rank, dtype, error)


def average_in_ddp(rank: int, dtype: str, error: float) -> None:
    """Average FP32 gradients, which only a CPU has; then with an infinity on one rank."""
    world_size, strategy = dist.get_world_size(), build("ddp", grad_reduce_dtype=dtype)
    model = nn.Linear(1001, 1, bias=False)
    wrapped = strategy.wrap(model, None)
    gradient = gradients_like(rank, 1001).float()
    average = sum(gradients_like(sender, 1001).double() for sender in range(world_size)) / world_size
    for scale, finite in ((1.0, True), (torch.inf, False)):
        model.weight.grad = None
        with strategy.accumulating(wrapped, first=True, last=True):
            strategy.backward(wrapped, wrapped(gradient * (scale if rank == 1 else 1.0)).sum())
        grads = ranks.gather(model.weight.grad)
        assert all(torch.equal(grads[0].nan_to_num(), grad.nan_to_num()) for grad in grads)
        assert model.weight.grad.isfinite().all() == finite, "an infinity on one rank skips the step"
        if finite:
            assert 0 < (model.weight.grad - average).norm() < error * average.norm()


class Blocks(nn.Module):
    """Two blocks and a root with a weight each."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))
        self.head = nn.Linear(width, width, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Collectives(TorchDispatchMode):
    """Counts the collectives that run inside."""

    def __init__(self, counts: Counter):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


class Adding(layers.Linear):
    def __init__(self):
        super().__init__(16, 16, params_dtype=torch.bfloat16)
        self.norm = nn.Parameter(torch.ones(16, dtype=torch.bfloat16))
        self.fused, self.gathered = [], []

    def forward(self, x):
        self.fused.append(self.fuse_wgrad_accumulation)
        self.gathered = [self.weight]  # the parameter that FSDP2 has put there
        return super().forward(x * self.norm)


def sums_held(model):
    return [getattr(b.gathered[0], "main_grad", None) is not None for b in model.blocks]


def batches_of(rank, micro_batches):
    return [
        torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * i + rank)).bfloat16()
        for i in range(micro_batches)
    ]


def model_that_adds():
    torch.manual_seed(0)
    model = Blocks()
    model.blocks = nn.ModuleList(Adding() for _ in range(2))
    model.head = nn.Linear(16, 16, bias=False, dtype=torch.bfloat16)
    return model


def sums_of_gemms(rank: int, mode: str, dtype: str, recompute: bool) -> None:
    groups = {"hsdp_shard_size": 1} if mode == "hsdp" else {}
    strategy = build(mode, gradient_accumulation_steps=3, grad_reduce_dtype=dtype, **groups)
    model, plain = model_that_adds(), model_that_adds()
    strategy.shard(model, parameter_dtype=torch.bfloat16, compute_dtype=torch.bfloat16)
    wrapped = strategy.wrap(model, None)
    for block in plain.blocks:
        block.fuse_wgrad_accumulation = False
    if recompute:
        for block in model.blocks:
            forward = block.forward
            block.forward = functools.partial(checkpoint, forward, use_reentrant=False)
    for micro_batches in (3, 1, 2):  # the last step of an epoch may have fewer
        expected = {name: 0.0 for name, _ in plain.named_parameters()}
        for r in range(2):
            for x in batches_of(r, micro_batches):
                plain.zero_grad()
                plain(x).float().square().sum().backward()
                for name, p in plain.named_parameters():
                    expected[name] = expected[name] + p.grad.float() / 2
        for i, x in enumerate(batches_of(rank, micro_batches)):
            with torch.no_grad():
                model(x)  # an evaluation between changes nothing
            for block in model.blocks:
                block.fused.clear()
            with strategy.accumulating(model, first=i == 0, last=i == micro_batches - 1):
                strategy.backward(wrapped, wrapped(x).float().square().sum())
            assert {fused for block in model.blocks for fused in block.fused} == {micro_batches > 1}
        for name, p in model.named_parameters():
            error = (p.grad.full_tensor().float() - expected[name]).norm() / expected[name].norm()
            assert error < (1e-2 if dtype == "bf16" else 4e-3), (name, micro_batches, error)
        assert sums_held(model) == [micro_batches > 1, False]  # only of the block that was exchanged last
        strategy.discard(model, torch.optim.SGD(model.parameters()))
        assert not any(sums_held(model))


def sums_in_gemms_are_exchanged(rank: int, folder: Path) -> None:
    sum_in_gemms(rank)
    for dtype, recompute in (("fp32", False), ("fp32", True), ("bf16", False)):
        sums_of_gemms(rank, "fsdp_full", dtype, recompute)
    sums_of_gemms(rank, "fsdp_grad", "fp32", True)
    sums_of_gemms(rank, "hsdp", "fp32", False)


def collectives_of_a_step(rank: int, folder: Path) -> None:
    # Blocks and root once a step; in every micro-batch the root once and each block twice.
    for mode, dtype, gathers in (
        ("fsdp_grad", "fp32", 3),
        ("fsdp_full", "fp32", 3 * (1 + 2 * 2)),
        ("fsdp_full", "fp8", 3 * (1 + 2 * 2)),
    ):
        strategy = build(mode, gradient_accumulation_steps=3, grad_reduce_dtype=dtype)
        model = Blocks()
        strategy.shard(model, parameter_dtype=torch.float32, compute_dtype=torch.float32)
        for _ in range(2):
            counts = Counter()
            with Collectives(counts):
                for i in range(3):
                    with strategy.accumulating(model, first=i == 0, last=i == 2):
                        strategy.backward(model, model(torch.ones(2, 8)).sum())
            exchange = "alltoall_base_" if dtype == "fp8" else "_reduce_scatter_base_"
            assert counts == {"_allgather_base_": gathers, exchange: 3}
            model.zero_grad()


def error_of_sums(mode: str, dtype: str, micro_batches: int, rank: int = 0) -> float:
    """Return the relative error of a step's gradient; the exact one sums the same BF16 gradients in FP64."""
    groups = {"hsdp_shard_size": 2 if dtype == "fp8" else 1} if mode == "hsdp" else {}
    settings = {"gradient_accumulation_steps": micro_batches, "grad_reduce_dtype": dtype}
    strategy = build(mode, **settings, **groups)
    torch.manual_seed(0)
    model = Blocks(16).bfloat16()
    plain = copy.deepcopy(model)
    strategy.shard(model, parameter_dtype=torch.bfloat16, compute_dtype=torch.bfloat16)
    wrapped = strategy.wrap(model, build_optimizer(model, OptimConfig(), FUSED))
    exact = [torch.zeros(16, 16, dtype=torch.float64) for _ in plain.parameters()]
    batches = [batches_of(r, micro_batches) for r in range(strategy.topology.sum_size)]
    for x in chain.from_iterable(batches):
        plain.zero_grad()
        plain(x).float().square().sum().backward()
        for total, parameter in zip(exact, plain.parameters(), strict=True):
            total += parameter.grad.double() / strategy.topology.sum_size
    for i, x in enumerate(batches[rank]):
        with strategy.accumulating(wrapped, first=i == 0, last=i == micro_batches - 1):
            strategy.backward(wrapped, wrapped(x).float().square().sum())
    gradients = strategy.gather([gradient_of(parameter) for parameter in model.parameters()])
    error, exact = (torch.cat([t.double().flatten() for t in ts]) for ts in (gradients, exact))
    return ((error - exact).norm() / exact.norm()).item()


def every_dtype_has_an_effect(rank: int, folder: Path) -> None:
    """A step's gradient is the better, the larger the format of its sums."""
    for mode, micro_batches in product(("ddp", "fsdp_full", "fsdp_grad", "hsdp"), (8, 64)):
        error = {dtype: error_of_sums(mode, dtype, micro_batches, rank) for dtype in ("fp32", "bf16", "fp8")}
        # FSDP2 rounds the FP32 sum to the parameters' dtype, once.
        assert error["fp32"] < (1e-6 if mode == "ddp" else 2e-3), (mode, micro_batches, error)
        assert 1.5 * error["fp32"] < error["bf16"] < error["fp8"] < 0.05, (mode, micro_batches, error)


def test_micro_batches_on_one_device_are_summed_in_the_dtype_asked_for():
    assert error_of_sums("single", "fp32", 64) < 1e-6 < 2e-3 < error_of_sums("single", "bf16", 64)


def groups_of_one_rank_send_nothing_in_fp8(rank: int, folder: Path) -> None:
    with pytest.raises(UserError) as refused:
        build("hsdp", grad_reduce_dtype="fp8")  # each rank is on a node of its own
    assert refused.value.flags == {"grad_reduce_dtype", "hsdp_shard_size"}


def uneven_models_are_refused(rank: int, folder: Path) -> None:
    dtypes = {"parameter_dtype": torch.float32, "compute_dtype": torch.float32}
    fp8_gather = {"fp8_all_gather": True, "mixed_precision": "fp8"}
    for settings, layer in ((fp8_gather, nn.Linear(8, 9)), ({}, nn.Linear(8, 8).bfloat16())):
        model = Blocks()
        model.blocks[1] = layer
        with pytest.raises(UserError) as refused:
            build("fsdp_full", **settings).shard(model, **dtypes)
        assert refused.value.flags == {"fp8_all_gather" if settings else "sharding_mode"}


ON_TWO_RANKS = [sums_in_gemms_are_exchanged, every_dtype_has_an_effect, collectives_of_a_step]
ON_TWO_RANKS += [groups_of_one_rank_send_nothing_in_fp8, uneven_models_are_refused]
ON_THREE_RANKS = [gradients_of_16_bits_are_summed_in_fp32, gradients_in_fp8_are_exchanged]


@pytest.mark.parametrize("work", ON_TWO_RANKS + ON_THREE_RANKS)
def test_on_several_ranks(work, tmp_path):
    run_ranks(work, tmp_path, world_size=3 if work in ON_THREE_RANKS else 2)
