"""How gradients are summed over ranks: in FP32, whatever the 16 bits they are in.

Within a node every rank sends every other one its piece in 16 bits, and sums what it receives in FP32: the
sums of an exchange in FP32 for half its traffic. Across nodes NCCL's rings are better, and travel in FP32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from training.parallel import ranks


def within_a_node(group_size: int) -> bool:
    """Whether groups of this many neighbouring ranks lie within a node, whose links join every pair."""
    return ranks.local_rank_and_size()[1] % group_size == 0


class FP32Sums:
    """FSDP2's reduce-scatter of 16-bit gradients, which are summed in FP32 where they arrive."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        output_tensor.copy_(_sum_of_pieces(input_tensor, group, mean=op == dist.ReduceOp.AVG))


def _sum_of_pieces(tensor: Tensor, group: Any, *, mean: bool) -> Tensor:
    """This rank's piece of the sum over ranks: [N * n] of any dtype to [n] in float32."""
    received = torch.empty_like(tensor)
    dist.all_to_all_single(received, tensor, group=group)
    pieces = received.view(dist.get_world_size(group), -1)
    return (torch.mean if mean else torch.sum)(pieces, dim=0, dtype=torch.float32)


def average_by_pieces(device: torch.device) -> Callable[[Any, dist.GradBucket], torch.futures.Future]:
    """DDP communication hook: as `FP32Sums`, and the averaged pieces are gathered in 16 bits again."""
    stream = torch.cuda.Stream(device)

    def hook(_, bucket):  # DDP refuses annotations that are strings, as all are in this module
        gradients, world_size = bucket.buffer(), dist.get_world_size()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            padding = -gradients.numel() % world_size
            whole = F.pad(gradients, (0, padding)) if padding else gradients
            piece = _sum_of_pieces(whole, None, mean=True).to(gradients.dtype)
            dist.all_gather_into_tensor(whole, piece)
            if padding:
                gradients.copy_(whole[: gradients.numel()])
            future = torch.futures.Future(devices=[device])
            future.set_result(gradients)  # remembers where on this stream it is done
        return future

    return hook


def average_in_fp32(_, bucket):  # DDP refuses annotations that are strings, as all are in this module
    """Communication hook: sums a bucket of 16-bit gradients over ranks in FP32."""
    low = bucket.buffer()
    high = low.float().div_(dist.get_world_size())
    future = dist.all_reduce(high, async_op=True).get_future()
    return future.then(lambda done: low.copy_(done.value()[0]))
