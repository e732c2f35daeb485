"""Gradient norm, gradient sums over ranks, and which mode is taken where."""

import functools
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.children import preload, run_ranks
from training.config import all_settings, config_from_dict
from training.optim.optimizer import plan_optimizer
from training.parallel import auto_mode, ranks
from training.parallel.auto_mode import Memory, choose_mode, refuse_small_gpu, refuse_small_host
from training.parallel.gradient_sums import FP32Sums
from training.parallel.strategies import FSDP, STRATEGIES, global_norm, hsdp_shard_size
from training.precision.settings import PrecisionConfig

preload(__name__)


def test_the_norm_is_that_of_all_gradients_in_fp32():
    assert global_norm([torch.tensor([[3.0]]), torch.tensor([4.0])]) == 5.0
    many = torch.full((1000,), 1 / 3, dtype=torch.bfloat16)
    norm = global_norm([many])
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, many.double().norm().float(), rtol=1e-6, atol=0)


def test_a_model_without_gradients_is_named():
    with pytest.raises(RuntimeError, match="nothing of the model is trainable"):
        global_norm([])


@pytest.mark.parametrize(
    ("variable", "sharing", "expected"),
    [("1", 2, 3), ("1", 8, 1), (None, 3, 2), ("5", 2, 2), ("1", 1, 6)],
    ids=["torchrun's default", "more ranks than cores", "not set", "the user's own", "bound to its own"],
)
def test_a_rank_that_steps_on_the_cpu_uses_its_share_of_the_cores(monkeypatch, variable, sharing, expected):
    for name in ranks.TORCHRUN:
        monkeypatch.setenv(name, "0")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(ranks, "cores", lambda: list(range(6)))
    others = [("another node", list(range(6))), ("here", list(range(6, 12)))]
    monkeypatch.setattr(ranks, "gather", lambda mine: [mine] * sharing + others)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert ranks.use_cores() == expected
    finally:
        torch.set_num_threads(before)


def test_every_mode_of_the_command_line_has_a_strategy():
    assert set(get_args(all_settings()["sharding_mode"][2])) == {"auto", *STRATEGIES} - {"single"}


# Parameters, bytes of weights and state as TE's optimizer has them, on GPUs of 100 GB: 60 GB are for these.
@pytest.mark.parametrize(
    ("billions", "world_size", "local_size", "mode"),
    [
        (0.5, 2, 2, "ddp"),  # 7 GB
        (1.2, 8, 8, "ddp"),  # 17 GB
        (4.0, 2, 2, "fsdp_grad"),  # 56 GB, which fit whole; gathered 16, a shard 28
        (8.0, 8, 8, "fsdp_grad"),  # 112 GB; gathered weights and gradients 32, a shard 14
        (20.0, 16, 8, "hsdp"),  # 280 GB; gathered 80, over the ranks of a node 35
        (20.0, 8, 8, "fsdp_full"),  # there is one node
        (20.0, 8, 1, "fsdp_full"),  # a node is one GPU
        (70.0, 32, 8, "fsdp_full"),  # 980 GB; over a node 122.5, over all ranks 31
        (40.0, 8, 8, "fsdp_full"),  # 560 GB; over all ranks 70, of which most GPUs' rest makes do
        (70.0, 8, 8, "fsdp_offload"),
    ],
)
def test_auto_takes_the_fastest_mode_of_those_that_fit(billions, world_size, local_size, mode):
    memory = Memory(int(billions * 1e9), weights=2, state=14, accumulated=0, gpu=int(100e9))
    found, why = choose_mode(memory, world_size=world_size, local_size=local_size)
    assert found == mode
    assert f"take {billions * 14:.1f} GB, a GPU has 60.0 GB for them" in why


@pytest.mark.parametrize(("billions", "mode"), [(0.5, "single"), (6.4, "single"), (6.5, "fsdp_offload")])
def test_auto_on_one_gpu_shards_nothing(billions, mode):
    """Up to 90 of its 100 GB, at 14 bytes a parameter."""
    memory = Memory(int(billions * 1e9), weights=2, state=14, accumulated=0, gpu=int(100e9))
    assert choose_mode(memory, world_size=1, local_size=1)[0] == mode


def test_auto_leaves_a_model_whole_if_accumulation_would_keep_whole_gradients_beside_shards():
    """4 B on 2 GPUs: 56 GB whole, or 28 GB of shards, 16 GB gathered and 16 GB of FP32 gradients kept."""
    memory = Memory(4 * 10**9, weights=2, state=14, accumulated=4, gpu=int(95e9))
    assert choose_mode(memory, world_size=2, local_size=2)[0] == "ddp"


def test_auto_counts_the_whole_gradients_that_accumulation_keeps():
    """20 B parameters on 8 GPUs with 60 GB for them: 35 GB of shards, and 80 GB of FP32 gradients."""
    memory = Memory(20 * 10**9, weights=2, state=14, accumulated=4, gpu=int(100e9))
    found, why = choose_mode(memory, world_size=8, local_size=8)
    assert found == "fsdp_offload" and "accumulated gradients 80.0 GB" in why


@pytest.mark.parametrize(
    ("billions", "shard_group_size", "ways"),
    [
        (8.0, 2, None),
        (
            8.0,
            1,
            "--master_weights none --moment_dtype bf16 takes 64.0 GB .*, or .* fsdp_full takes 2 such",
        ),
        (70.0, 8, "--master_weights none --moment_dtype bf16 takes 70.0 GB .* fsdp_full takes 14 such GPUs"),
        (70.0, 1, "--sharding_mode fsdp_full takes 14 such GPUs"),
    ],
)
def test_what_a_gpu_cannot_hold_is_refused_with_what_it_takes(billions, shard_group_size, ways):
    """14 bytes a parameter, on GPUs of 100 GB (1e9 bytes)."""

    def check():
        memory = Memory(int(billions * 1e9), weights=2, state=14, accumulated=0, gpu=int(100e9))
        refuse_small_gpu("m", memory, mode=mode, shard_group_size=shard_group_size, shrinks=True)

    mode, where = (
        ("single", "on one GPU") if shard_group_size == 1 else ("fsdp_full", "--sharding_mode fsdp_full")
    )
    if ways is None:
        return check()
    needed = billions * 14 / shard_group_size
    with pytest.raises(
        RuntimeError,
        match=f"^--model_name m, {where}: .* take {needed:.1f} GB a GPU, which has 100.0 GB: {ways}",
    ):
        check()


@pytest.mark.parametrize(("accumulated", "gpus"), [(0, 2), (4, 4), (10, None)])
def test_the_ways_out_are_ways_that_are_open(accumulated, gpus):
    """8 B parameters of 14 bytes; 80 GB, of which 75 % are 60, less the whole gradients of accumulation."""
    memory = Memory(8 * 10**9, weights=2, state=14, accumulated=accumulated, gpu=int(80e9))
    with pytest.raises(RuntimeError) as refused:
        refuse_small_gpu("m", memory, mode="single", shard_group_size=1, shrinks=False)
    said = str(refused.value)
    assert "--moment_dtype" not in said and said.endswith(
        "--sharding_mode fsdp_offload takes the hosts' memory"
    )
    assert (f"fsdp_full takes {gpus} such GPUs" in said) == (gpus is not None)
    assert ("fsdp_full" in said) == (gpus is not None)


def shared_by(rank, folder):
    """Ranks that hold one copy of weights and optimizer state together."""
    for settings, shard_group_size in (
        ({"sharding_mode": "ddp"}, 1),
        ({"sharding_mode": "fsdp_full"}, 2),
        ({"sharding_mode": "fsdp_grad"}, 2),
        ({"sharding_mode": "hsdp", "hsdp_shard_size": 1}, 1),
    ):
        cfg = config_from_dict(settings)
        assert STRATEGIES[cfg.sharding.mode](torch.device("cpu"), cfg).shard_group_size == shard_group_size


def test_strategies_know_how_many_ranks_share_the_state(tmp_path):
    run_ranks(shared_by, tmp_path)


def test_auto_without_a_gpu_is_ddp():
    assert choose_mode(None, world_size=2, local_size=2)[0] == "ddp"


@pytest.mark.parametrize(
    ("mode", "instead"),
    [("fsdp_offload", "fsdp_full"), ("ds_zero3_offload", "ds_zero3"), ("deepspeed", "ds_zero3")],
)
def test_a_host_too_small_to_offload_to_is_refused(mode, instead, monkeypatch):
    """8 B parameters, 20 bytes each: 160 GB, of which a node of two has to hold a half."""
    monkeypatch.setattr(auto_mode, "host_memory", lambda: int(100e9))
    monkeypatch.setattr(ranks, "local_rank_and_size", lambda: (0, 8))
    monkeypatch.setattr(ranks, "world_size", lambda: 16)
    refuse_small_host(8 * 10**9, mode, 20)
    monkeypatch.setattr(ranks, "world_size", lambda: 8)
    refused = rf"--sharding_mode {mode}: needs 160 GB .* which has 100 GB; use more nodes, or {instead}$"
    with pytest.raises(RuntimeError, match=refused):
        refuse_small_host(8 * 10**9, mode, 20)


def test_offload_counts_fp32_weights_and_state_and_the_halves_of_a_save():
    plan = plan_optimizer(PrecisionConfig(), on_gpu=True, master_home="cpu")
    weights = gradients = moment = 4
    halves = 2 + 2
    each = [FSDP.__new__(FSDP).host_bytes(plan.state_bytes, saves=saves) for saves in (False, True)]
    assert each == [weights + gradients + 2 * moment, weights + gradients + 2 * moment + halves]


@pytest.mark.parametrize(("given", "size"), [(None, 4), (2, 2), (8, 8), (1, 1)])
def test_hsdp_shards_over_a_node_or_as_many_ranks_as_are_given(given, size, monkeypatch):
    monkeypatch.setattr(ranks, "world_size", lambda: 8)
    monkeypatch.setattr(ranks, "local_rank_and_size", lambda: (0, 4))
    assert hsdp_shard_size(config_from_dict({"sharding_mode": "hsdp", "hsdp_shard_size": given})) == size


@pytest.mark.parametrize("given", [3, 16])
def test_hsdp_shards_that_do_not_divide_the_ranks_are_refused(given, monkeypatch):
    monkeypatch.setattr(ranks, "world_size", lambda: 8)
    with pytest.raises(ValueError, match=f"--hsdp_shard_size {given}: does not divide the 8 ranks"):
        hsdp_shard_size(config_from_dict({"sharding_mode": "hsdp", "hsdp_shard_size": given}))


def sum_by_pieces(rank: int, folder: Path) -> None:
    """Terms that BF16 sums would lose: a large one on rank 0, small ones on the others."""
    world_size = dist.get_world_size()
    large = torch.arange(1, 12 * world_size + 1).bfloat16() * 256
    mine = large if rank == 0 else torch.full_like(large, 0.5)
    for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, world_size)):
        output = torch.empty(12, dtype=torch.float32)
        FP32Sums()(output, mine.clone(), group=dist.group.WORLD, op=op)
        expected = (large.double() + 0.5 * (world_size - 1))[12 * rank : 12 * (rank + 1)] / divisor
        torch.testing.assert_close(output, expected.float(), rtol=1e-7, atol=0)


def test_16_bit_gradients_are_summed_in_fp32(tmp_path):
    run_ranks(sum_by_pieces, tmp_path, world_size=3)


def average_in_buckets(rank: int, folder: Path) -> None:
    """At every weight another rank has the large term, so that no order of BF16 sums keeps all small ones."""
    world_size = dist.get_world_size()
    strategy = STRATEGIES["ddp"](torch.device("cpu"), config_from_dict({"sharding_mode": "ddp"}))
    model = nn.Linear(12, 1, bias=False, dtype=torch.bfloat16)
    wrapped, _ = strategy.wrap(model, None)
    large = torch.arange(12) % world_size == rank
    gradient = torch.where(large, 192.0, 0.75).bfloat16()
    with strategy.accumulating(wrapped, first=True, last=True):
        strategy.backward(wrapped, wrapped(gradient).sum())
    assert model.weight.grad.eq(64 + 0.25 + 0.25).all(), model.weight.grad


def test_ddp_sums_gradients_of_bf16_weights_in_fp32(tmp_path):
    run_ranks(average_in_buckets, tmp_path, world_size=3)


class Blocks(nn.Module):
    """Two blocks and a root with a weight each."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        self.head = nn.Linear(8, 8, bias=False)

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


class InGemm(torch.autograd.Function):
    """As TE's linear layers with `fuse_wgrad_accumulation`: adds to a sum, and returns no gradient."""

    @staticmethod
    def forward(ctx, x, weight, fused):
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.fused = weight, fused
        ctx.overwrites = getattr(weight, "overwrite_main_grad", False)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        gradient = grad.float().T @ x.float()
        if not ctx.fused:
            return grad @ weight, gradient.to(weight.dtype), None
        ctx.weight.main_grad = total = ctx.weight.get_main_grad()
        if ctx.overwrites:
            total.copy_(gradient)
        else:
            total += gradient
        return grad @ weight, None, None


class Adding(nn.Linear):
    def __init__(self):
        super().__init__(16, 16, bias=False, dtype=torch.bfloat16)
        self.fuse_wgrad_accumulation = True
        self.norm = nn.Parameter(torch.ones(16, dtype=torch.bfloat16))
        self.taken, self.gathered = [], []

    def forward(self, x):
        self.taken.append(self.fuse_wgrad_accumulation)
        self.gathered = [self.weight]  # the parameter that FSDP2 has put there
        return InGemm.apply(x * self.norm, self.weight, self.fuse_wgrad_accumulation)


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


def sums_of_gemms(rank: int, folder: Path, mode: str, dtype: str, recompute: bool) -> None:
    settings = {"sharding_mode": mode, "gradient_accumulation_steps": 3, "grad_reduce_dtype": dtype}
    settings |= {"hsdp_shard_size": 1} if mode == "hsdp" else {}
    strategy = STRATEGIES[mode](torch.device("cpu"), config_from_dict(settings))
    model, plain = model_that_adds(), model_that_adds()
    strategy.shard(model, parameter_dtype=torch.bfloat16, compute_dtype=torch.bfloat16)
    assert strategy.fuses_wgrad_accumulation("fused_adamw")
    wrapped, _ = strategy.wrap(model, None)
    for block in plain.blocks:
        block.fuse_wgrad_accumulation = False
    if recompute:
        for block in model.blocks:
            forward = block.forward
            block.forward = functools.partial(checkpoint, forward, use_reentrant=False)
    for micro_batches in (3, 1, 2, 3):  # the last window of an epoch may be shorter
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
                block.taken.clear()
            with strategy.accumulating(model, first=i == 0, last=i == micro_batches - 1):
                strategy.backward(wrapped, wrapped(x).float().square().sum())
            assert {fused for block in model.blocks for fused in block.taken} == {micro_batches > 1}
        for name, p in model.named_parameters():
            found = p.grad.full_tensor().float()
            error = (found - expected[name]).norm() / expected[name].norm()
            assert error < (1e-2 if dtype == "bf16" else 4e-3), (name, micro_batches, error)
        assert sums_held(model) == [micro_batches > 1, False]  # of the block that was exchanged last alone
        strategy.discard(model, torch.optim.SGD(model.parameters()))
        assert not any(sums_held(model))


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", ["fsdp_full", "fsdp_grad", "hsdp"])
def test_sums_that_gemms_add_up_are_exchanged(tmp_path, mode, dtype, recompute):
    run_ranks(sums_of_gemms, tmp_path, mode, dtype, recompute)


def gathers_of_a_step(rank: int, folder: Path, mode: str, expected: int) -> None:
    cfg = config_from_dict({"sharding_mode": mode, "gradient_accumulation_steps": 3})
    strategy, model = STRATEGIES[mode](torch.device("cpu"), cfg), Blocks()
    strategy.shard(model, parameter_dtype=torch.float32, compute_dtype=torch.float32)
    for _ in range(2):
        counts = Counter()
        with Collectives(counts):
            for i in range(3):
                with strategy.accumulating(model, first=i == 0, last=i == 2):
                    strategy.backward(model, model(torch.ones(2, 8)).sum())
        assert counts["_allgather_base_"] == expected and counts["_reduce_scatter_base_"] == 3, counts
        model.zero_grad()


@pytest.mark.parametrize(
    ("mode", "expected"),
    # Blocks and root once a step; in every micro-batch the root once and each block twice.
    [("fsdp_grad", 3), ("fsdp_full", 3 * (1 + 2 * 2))],
)
def test_weights_are_gathered_once_a_step_or_twice_a_micro_batch(tmp_path, mode, expected):
    run_ranks(gathers_of_a_step, tmp_path, mode, expected)
