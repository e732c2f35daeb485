"""Reduction of gradients over ranks with FP32 sums.

Within a node the ranks exchange BF16 shards by all-to-all, and each sums what it receives in FP32, which is
as exact as an FP32 reduction and halves its traffic. Across nodes NCCL's rings are faster, and carry FP32.

With --grad_reduce_dtype fp8 the shards travel in E4M3, with a power of two per block of 128 values as scale:
half the bytes of BF16, within and across nodes. The sums are in FP32 all the same. DDP rounds the average
once more, for the all-gather; under hsdp FSDP2 sums the copies of a shard in BF16.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fp8_suite.core.patches import FP8_EXCHANGE
from fp8_suite.te_models.kernels.selection import reports_failure
from fp8_suite.training.parallel import ranks
from torch import Tensor, nn

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future]  # of DDP
FP8_BLOCK = 128
FP8_EXPONENT = 8  # a block is scaled to values below 2**8; E4M3 ends at 448
PARTS = 8  # in which what other ranks sent is decoded
NOT_FINITE = -128  # exponent of a block with a NaN, an infinity, or a value of 2**127 or more


def within_a_node(group_size: int) -> bool:
    """True if groups of `group_size` consecutive ranks never span nodes."""
    return ranks.local_rank_and_size()[1] % group_size == 0


def _reduce_scatter_fp32(out: Tensor, tensor: Tensor, group: Any, *, mean: bool) -> None:
    """Reduce-scatter a tensor [N * n] of any dtype over N ranks to this rank's `out` [n], summed in FP32."""
    received = torch.empty_like(tensor)
    dist.all_to_all_single(received, tensor, group=group)
    received = received.view(dist.get_world_size(group), -1)  # [N, n]
    out.copy_((torch.mean if mean else torch.sum)(received, dim=0, dtype=torch.float32))


def _reduce_scatter_fp8(out: Tensor, tensor: Tensor, group: Any, *, mean: bool) -> None:
    """Reduce-scatter as `_reduce_scatter_fp32` does, with values sent in FP8."""
    packed = pack_fp8(tensor.view(dist.get_world_size(group), -1))
    received = torch.empty_like(packed)
    dist.all_to_all_single(received, packed, group=group)
    del packed
    sum_fp8(received, out, mean=mean)


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    """Return the tensor, or a copy with its last dimension padded to a multiple."""
    padding = -tensor.shape[-1] % multiple
    return F.pad(tensor, (0, padding)) if padding else tensor


def pack_fp8(values: Tensor) -> Tensor:
    """Return rows [N, n] of any float dtype, padded to m blocks of 128, as uint8 [N, m * 129].

    A row has its E4M3 codes first, then the exponents of its blocks.
    """
    blocks = _padded(values, FP8_BLOCK).unflatten(1, (-1, FP8_BLOCK))
    largest = blocks.abs().amax(-1)
    exponents = torch.frexp(largest.float()).exponent.clamp(-118)  # largest < 2**exponent
    scales = torch.exp2((FP8_EXPONENT - exponents).float()).to(values.dtype)
    codes = (blocks * scales[..., None]).to(torch.float8_e4m3fn)
    exponents = torch.where(largest < 2.0**127, exponents, NOT_FINITE).to(torch.int8)
    return torch.cat([codes.flatten(1).view(torch.uint8), exponents.view(torch.uint8)], dim=1)


def sum_fp8(packed: Tensor, out: Tensor, *, mean: bool) -> None:
    """Write the sum or mean of the N rows of `pack_fp8`, computed in FP32, to `out` [n]."""
    first, *rest = packed.split(-(-len(packed) // PARTS))
    total = _unpack_fp8(first).sum(0)
    for part in rest:  # FP32 values of all rows at once would need a lot of memory
        total += _unpack_fp8(part).sum(0)
    out.copy_(total[: len(out)] / (len(packed) if mean else 1))


def decode_fp8(packed: Tensor, out: Tensor) -> None:
    """Write the values of `pack_fp8` to rows `out` [N, n]."""
    size = -(-len(packed) // PARTS)
    for part, rows in zip(packed.split(size), out.split(size), strict=True):
        rows.copy_(_unpack_fp8(part)[:, : out.shape[1]])


def _unpack_fp8(packed: Tensor) -> Tensor:
    """Return the values [N, m * 128] of `pack_fp8` in FP32. Blocks that were not finite are NaN."""
    codes, exponents = packed.tensor_split([packed.shape[1] // (FP8_BLOCK + 1) * FP8_BLOCK], dim=1)
    exponents = exponents.contiguous().view(torch.int8).int()
    scales = torch.where(exponents == NOT_FINITE, torch.nan, torch.exp2((exponents - FP8_EXPONENT).float()))
    values = codes.contiguous().view(torch.float8_e4m3fn).float().unflatten(1, (-1, FP8_BLOCK))
    return (values * scales[..., None]).flatten(1)


def fused_fp8() -> AbstractContextManager[None]:
    """Make the FP8 exchange use the kernels of `gradient_exchange_triton`."""
    return FP8_EXCHANGE.on(lambda original: functools.partial(_run, original.__name__))


def _run(kernel: str, *arguments: Any, **settings: Any) -> Any:
    module = importlib.import_module("fp8_suite.training.parallel.gradient_exchange_triton")
    return getattr(module, kernel)(*arguments, **settings)


@reports_failure
def self_test(device: str = "cuda") -> str | None:
    """Compare the kernels with the functions that they replace; return the first difference, or None."""
    # 5,000 values do not fill the last block; Triton compiles other kernels for multiples of 16.
    for rows, width, dtype in ((2, 5000, torch.float32), (8, 8192, torch.bfloat16)):
        generator = torch.Generator(device).manual_seed(0)
        values = torch.randn(rows, width, device=device, generator=generator)
        values *= 10.0 ** torch.linspace(-44, 38, width, device=device)
        values[:, 1024:1152] = 0
        values[0, 2048], values[1, 3072] = torch.nan, -torch.inf
        values = values.to(dtype)
        packed, expected_packed = _run("pack_fp8", values), pack_fp8(values)
        for unpack, out, settings in (
            (decode_fp8, values, {}),
            (sum_fp8, values[0], {"mean": True}),
            (sum_fp8, values[0], {"mean": False}),
        ):
            result, expected = torch.empty_like(out), torch.empty_like(out)
            _run(unpack.__name__, packed, result, **settings)
            unpack(expected_packed, expected, **settings)
            if not torch.allclose(result, expected, rtol=0, atol=0, equal_nan=True):
                return f"{unpack.__name__} differs from the reference"
    return None


class ReduceScatter:
    """Reduce-scatter for FSDP2's `set_custom_reduce_scatter`, by all-to-all and an FP32 sum on each rank."""

    def __init__(self, *, fp8: bool):
        self.reduce_scatter = _reduce_scatter_fp8 if fp8 else _reduce_scatter_fp32

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self.reduce_scatter(output_tensor, input_tensor, group, mean=op == dist.ReduceOp.AVG)


def all_to_all_hook(device: torch.device, group: Any, *, fp8: bool) -> Hook:
    """Return a DDP hook that averages a bucket with FP32 sums and all-gathers it, in its dtype or in FP8.

    `group` are the ranks of DDP; None: all.
    """
    average = _average_fp8 if fp8 else _average_fp32
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def hook(_, bucket):  # no annotations: DDP checks them and refuses strings (`from __future__`)
        gradients = bucket.buffer()
        future = torch.futures.Future(devices=[device] if stream else None)
        if stream:
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # does nothing for None
            padded = _padded(gradients, dist.get_world_size(group))
            average(padded, group)
            if padded is not gradients:
                gradients.copy_(padded[: gradients.numel()])
            future.set_result(gradients)  # records an event on the stream, for which DDP waits
        return future

    return hook


def _average_fp32(gradients: Tensor, group: Any) -> None:
    shard = gradients.new_empty(len(gradients) // dist.get_world_size(group))
    _reduce_scatter_fp32(shard, gradients, group, mean=True)
    dist.all_gather_into_tensor(gradients, shard, group=group)


def _average_fp8(gradients: Tensor, group: Any) -> None:
    rows = gradients.view(dist.get_world_size(group), -1)
    shard = gradients.new_empty(rows.shape[1], dtype=torch.float32)
    _reduce_scatter_fp8(shard, gradients, group, mean=True)
    packed = pack_fp8(shard[None])
    received = packed.new_empty(len(rows), packed.shape[1])
    dist.all_gather_into_tensor(received, packed, group=group)
    decode_fp8(received, rows)


def average_sums(model: nn.Module, group: Any, *, uses_all_parameters: bool) -> None:
    """Average the sums in `main_grad` over ranks, in FP32. Every rank adds zeros for a sum that it lacks."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not uses_all_parameters:
        used = [getattr(p, "main_grad", None) is not None for p in parameters]
        used = torch.tensor(used, dtype=torch.uint8, device=parameters[0].device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
        parameters = [p for p, is_used in zip(parameters, used.tolist(), strict=True) if is_used]
    for p in parameters:
        if getattr(p, "main_grad", None) is None:
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    sums = [p.main_grad for p in parameters]
    torch._foreach_div_(sums, dist.get_world_size(group))
    for exchange in [dist.all_reduce(total, group=group, async_op=True) for total in sums]:
        exchange.wait()


def all_reduce_hook(dtype: torch.dtype, group: Any) -> Hook:
    """Return a DDP hook that averages a bucket over a group by an all-reduce in `dtype`."""

    def hook(_, bucket):
        gradients = bucket.buffer()
        sent = gradients.to(dtype).div_(dist.get_world_size(group))
        future = dist.all_reduce(sent, group=group, async_op=True).get_future()
        return future.then(lambda done: gradients.copy_(done.value()[0]))

    return hook
