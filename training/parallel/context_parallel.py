"""Context parallelism: ranks share each sequence, and attention exchanges keys and values between them.

Shapes: T tokens of whole sequences, H query heads, G key/value groups, K head size.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from fp8_suite.core.errors import EXIT_FAILED, UserError, bad_setting, first_line
from fp8_suite.core.settings import AUTO
from fp8_suite.te_models.decoder import TECausalLM, sequence_arguments
from fp8_suite.te_models.emulation.context import attend_causally
from fp8_suite.te_models.options import ContextParallel
from fp8_suite.te_models.shape import ModelShape
from fp8_suite.training.parallel import ranks
from fp8_suite.training.parallel.settings import ShardingConfig
from fp8_suite.training.parallel.topology import Topology
from torch import Tensor

CHUNK = 16  # tokens of a chunk of the shorter sequence in the self-test
LARGEST_ERROR = 0.05  # relative; BF16 rounding is below 0.01


def comm_type(cfg: ShardingConfig, shape: ModelShape, backend: str | None) -> str | None:
    """Return TE's `cp_comm_type` for this run, or None without context parallelism.

    `shape` is of the layers that a rank holds. `auto` prefers a2a: a kernel sees whole sequences, and has one
    result to keep for recomputation. UserError if heads cannot be split, or emulated layers do not have it.
    """
    if (size := cfg.context_parallel_size) == 1:
        return None
    tp, chosen = cfg.tensor_parallel_size, cfg.cp_comm_type
    if chosen == AUTO:
        chosen = "a2a" if backend == "native" and _splits(shape, size) else "all_gather"
    if backend == "emulated" and chosen != "all_gather":
        reason = "emulated TE layers gather keys and values; use all_gather, or auto"
        raise bad_setting(reason, cp_comm_type=chosen)
    heads = f"{shape.num_heads} query heads and {shape.num_kv_heads} key heads"
    flags = {"cp_comm_type": chosen, "context_parallel_size": size}
    if chosen == "a2a+p2p" and tp > 1:
        raise bad_setting("does not run with it; use p2p", cp_comm_type=chosen, tensor_parallel_size=tp)
    if chosen == "a2a" and not _splits(shape, size):
        raise bad_setting(f"cannot split {heads} evenly; use p2p or all_gather", **flags)
    if chosen == "a2a+p2p" and not _a2a_size(shape, size):
        raise bad_setting(f"has no divisor in between that splits {heads}; use p2p", **flags)
    return chosen


def _splits(shape: ModelShape, size: int) -> bool:
    heads = math.gcd(shape.num_heads, shape.num_kv_heads)
    return heads % size == heads % 2 == 0  # TE's kernels need even numbers of heads


def _a2a_size(shape: ModelShape, size: int) -> int | None:
    """Return how many ranks exchange heads in a2a+p2p: the most that leave several for the ring, or None."""
    fitting = [n for n in range(2, size) if size % n == 0 and _splits(shape, n)]
    return max(fitting, default=None)


def join_context(
    topology: Topology, cp_comm_type: str | None, shape: ModelShape, device: torch.device
) -> ContextParallel | None:
    """Create the groups of TE's `cp_comm_type`; None without context parallelism. Collective."""
    if cp_comm_type is None:
        return None
    size, group = topology.cp, topology.context_group
    members = dist.get_process_group_ranks(group)
    if cp_comm_type == "a2a+p2p":
        inner = _a2a_size(shape, size)
        contexts = range(0, topology.world_size, size)
        rings = [[*range(start + n, start + size, inner)] for start in contexts for n in range(inner)]
        timeout = ranks.COLLECTIVE_TIMEOUT
        heads, _ = dist.new_subgroups(inner, timeout=timeout)
        ring, _ = dist.new_subgroups_by_enumeration(rings, timeout=timeout)
        group = [heads, ring]
    return ContextParallel(topology.context, cp_comm_type, group, members, _stream(cp_comm_type, device))


def _stream(cp_comm_type: str, device: torch.device) -> Any:
    """Return the CUDA stream on which TE attends to every other chunk, beside the main one; None on a CPU.

    In a2a TE only reorders tokens on it. That is the main stream, which could not reuse memory that is
    allocated on another: 2 GB for 65,536 tokens of an 8B per rank. Nor does TE call `record_stream`.
    """
    if device.type != "cuda":
        return None
    return torch.cuda.current_stream(device) if cp_comm_type == "a2a" else torch.cuda.Stream(device)


def check_attention(model: TECausalLM, context: ContextParallel) -> None:
    """Compare a layer's attention over all ranks with plain attention on one. Collective.

    UserError if it differs, because a kernel that leaves out the other ranks' keys trains a wrong model.
    """
    formats = ["thd", "bshd"] if model.options.packed else ["bshd"]
    device, way_out = model.options.device, "use another type, or --no_flash_attention"
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
            errors = torch.tensor([_errors(model, context, qkv_format) for qkv_format in formats])
    except (AssertionError, ValueError) as error:  # TE has no kernel for these heads, flags or this GPU
        reason = f"TE cannot run it here ({first_line(error)}); {way_out}"
        raise bad_setting(reason, cp_comm_type=context.comm_type) from error
    largest = max(ranks.gather(errors.nan_to_num(nan=torch.inf).max().item()))
    if largest > LARGEST_ERROR:
        raise UserError(
            f"--cp_comm_type {context.comm_type}: attention over {context.part.size} ranks differs from "
            f"attention on one by {largest:.0%}, so training would be wrong; {way_out}",
            flags=["cp_comm_type", "context_parallel_size"],
            exit_code=EXIT_FAILED,
        )


def _errors(model: TECausalLM, context: ContextParallel, qkv_format: str) -> list[float]:
    """Return the relative errors of this rank's output and of its gradients of q, k and v."""
    config, part, device = model.config, context.part, model.options.device
    dtype = model.options.compute_dtype or model.options.dtype
    dtype = torch.bfloat16 if dtype == torch.float32 else dtype  # under autocast
    unit = CHUNK * part.multiple
    boundaries = [0, unit, 3 * unit] if qkv_format == "thd" else [0, 2 * unit]
    shape = ModelShape.from_hf_config(config).part(model.tensor.size if model.tensor else 1)
    numbers = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads)
    generator = torch.Generator().manual_seed(0)
    sizes = [(boundaries[-1], number, shape.head_dim) for number in numbers]
    q, k, v, grad = (torch.randn(size, generator=generator).to(device, dtype) for size in sizes)
    plain = partial(_plain_attention, boundaries=boundaries)
    expected = _results(plain, (q, k, v), grad, torch.float32)
    places = torch.from_numpy(part.places(boundaries)).to(device)
    mine = [x[places] for x in (q, k, v, grad)]
    results = _results(lambda *qkv: _attend(model, *qkv, boundaries, qkv_format), mine[:3], mine[3], dtype)
    pairs = zip(results, (x[places] for x in expected), strict=True)
    return [((a.float() - b).norm() / b.norm()).item() for a, b in pairs]


def _results(attend: Any, qkv: Any, grad: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return the output [T, H*K] and the gradients of q, k and v."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in qkv]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.flatten(1).to(out.dtype))]


def _plain_attention(*qkv: Tensor, boundaries: list[int]) -> Tensor:
    """Attend causally within each sequence, q [T, H, K], k and v [T, G, K] -> [T, H*K]."""
    sequences = ([x[None, start:end] for x in qkv] for start, end in pairwise(boundaries))
    return torch.cat([attend_causally(*sequence)[0] for sequence in sequences])


def _attend(
    model: TECausalLM, q: Tensor, k: Tensor, v: Tensor, boundaries: list[int], qkv_format: str
) -> Tensor:
    """Run the first layer's attention on this rank's tokens, as the layer does."""
    attention = next(iter(model.layers)).self_attention.core_attention
    if qkv_format == "bshd" and model.is_native and model.tensor:
        q, k, v, qkv_format = q[:, None], k[:, None], v[:, None], "sbhd"
    elif qkv_format == "bshd":
        q, k, v = q[None], k[None], v[None]
    if not model.is_native:
        out = attention(q, k, v, boundaries)
    elif qkv_format != "thd":
        out = attention(q, k, v, qkv_format=qkv_format, attn_mask_type="causal")
    else:
        cu_seqlens = torch.tensor(boundaries, dtype=torch.int32, device=q.device)
        longest = max(end - start for start, end in pairwise(boundaries))
        lengths = sequence_arguments(cu_seqlens, longest, padded=True)
        out = attention(q, k, v, qkv_format=qkv_format, attn_mask_type="padding_causal", **lengths)
    return out.flatten(0, -2)
