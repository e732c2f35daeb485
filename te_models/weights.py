"""Conversion of weights between Hugging Face and Transformer Engine layouts.

D hidden size, F feed-forward size, H query heads, G key/value groups, R = H / G queries per group,
K head size. Linear weights are [out, in].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from fp8_suite.te_models.families import FAMILIES
from fp8_suite.te_models.lora.adapters import base_parameters
from fp8_suite.te_models.parallel.tensor_parallel import Region
from fp8_suite.te_models.sources import WeightSource
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
SPLIT_ROOT = {"embed_tokens.weight": EMBEDDING, "lm_head.weight": LM_HEAD}  # under tensor parallelism


def fuse_qkv(q: Tensor, k: Tensor, v: Tensor, *, heads: int, groups: int) -> Tensor:
    """Interleave [H*K, D], [G*K, D], [G*K, D] to [G*(R+2)*K, D]: per group R queries, one key, one value.

    This is the layout of te.TransformerLayer(fuse_qkv_params=True, qkv_weight_interleaved=True). Biases, such
    as [H*K], are fused in the same way.
    """
    size, rest = q.shape[0] // heads, q.shape[1:]
    q = q.reshape(groups, heads // groups, size, *rest)  # [G, R, K, D]
    k = k.reshape(groups, 1, size, *rest)  # [G, 1, K, D]
    v = v.reshape(groups, 1, size, *rest)  # [G, 1, K, D]
    return torch.cat([q, k, v], dim=1).flatten(0, 2)  # [G*(R+2)*K, D]


def split_qkv(qkv: Tensor, *, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Invert `fuse_qkv`: [G*(R+2)*K, D] -> [H*K, D], [G*K, D], [G*K, D]."""
    per_group = heads // groups
    size, rest = qkv.shape[0] // (groups * (per_group + 2)), qkv.shape[1:]
    qkv = qkv.reshape(groups, per_group + 2, size, *rest)  # [G, R+2, K, D]
    q, k, v = qkv.split([per_group, 1, 1], dim=1)  # [G, R or 1, K, D]
    return q.flatten(0, 2), k.flatten(0, 2), v.flatten(0, 2)


# TE name -> Hugging Face name of the tensors that have the same layout in both.
RENAMED = {
    "self_attention.layernorm_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.proj.weight": "self_attn.o_proj.weight",
    "layernorm_mlp.layer_norm_weight": "post_attention_layernorm.weight",
    "layernorm_mlp.fc2_weight": "mlp.down_proj.weight",
}
QK_NORMS = {f"self_attention.{p}_norm.weight": f"self_attn.{p}_norm.weight" for p in "qk"}


def _layout(config: Any) -> tuple[dict[str, str], tuple[str, ...], dict[str, int]]:
    """Return names (TE: Hugging Face) of renamed tensors, kinds of fused ones, arguments of `fuse_qkv`."""
    family = FAMILIES[config.model_type]
    renamed = RENAMED | (QK_NORMS if family.qk_norm else {})
    kinds = ("weight", "bias") if family.qkv_bias else ("weight",)
    return renamed, kinds, {"heads": config.num_attention_heads, "groups": config.num_key_value_heads}


def layer_to_te(hf: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Convert a decoder layer's Hugging Face tensors to TE's, and empty `hf`.

    Names are without the prefix `model.layers.N.`.
    """
    renamed, kinds, sizes = _layout(config)
    te = {name: hf.pop(hf_name) for name, hf_name in renamed.items()}
    for kind in kinds:
        q, k, v = (hf.pop(f"self_attn.{p}_proj.{kind}") for p in "qkv")
        te[f"self_attention.layernorm_qkv.{kind}"] = fuse_qkv(q, k, v, **sizes)
    # TE's SwiGLU applies silu to the first half: silu(x[:F]) * x[F:].
    gate, up = hf.pop("mlp.gate_proj.weight"), hf.pop("mlp.up_proj.weight")
    te["layernorm_mlp.fc1_weight"] = torch.cat([gate, up])  # [2F, D]
    assert not hf, f"a TE layer has no place for {', '.join(hf)}"
    return te


def layer_to_hf(te: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Invert `layer_to_te` exactly, emptying `te`."""
    renamed, kinds, sizes = _layout(config)
    hf = {hf_name: te.pop(name) for name, hf_name in renamed.items()}
    for kind in kinds:
        qkv = split_qkv(te.pop(f"self_attention.layernorm_qkv.{kind}"), **sizes)
        hf |= {f"self_attn.{p}_proj.{kind}": part for p, part in zip("qkv", qkv, strict=True)}
    gate, up = te.pop("layernorm_mlp.fc1_weight").chunk(2)  # [F, D] each
    hf |= {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}
    assert not te, f"a Hugging Face model has no place for {', '.join(te)}"
    return hf


# Loading by row numbers.
#
# Linear weights are [out, in], so the conversions above only permute rows. Sharded loading runs them on row
# numbers instead of rows: each tensor is replaced by arange(rows), with the index of the tensor in the upper
# 32 bits. Entry i of the result is then the source row of row i of the TE parameter. A rank that holds rows
# a to b reads exactly the source rows listed there, never a whole tensor, and the conversions need no second
# implementation for shards.
ROW_BITS = 32


def _number_rows(shapes: Mapping[str, torch.Size]) -> tuple[dict[str, Tensor], dict[int, str]]:
    """Return the row numbers of each tensor, [rows] int64, and the tensor names by their upper bits."""
    numbered = {
        name: torch.arange(shape[0]) + (i << ROW_BITS) for i, (name, shape) in enumerate(shapes.items())
    }
    return numbered, dict(enumerate(shapes))


Split = Callable[[Tensor], tuple[Tensor, Tensor]]  # as `optim.adamw.split_master`


def _fill(
    parameter: Tensor,
    numbers: Tensor,
    owners: dict[int, str],
    source: WeightSource,
    split: Split | None = None,
    region: Region | None = None,
) -> None:
    """Copy the rows with these numbers [rows] to `parameter`; for a DTensor, only this rank's shard.

    With a `region`, `parameter` holds that part of the rows, or of their columns. With `split`, FP8 weights
    also become `parameter.low_half`, the low half of its master.
    """
    numbers = region.take(numbers) if region else numbers
    assert len(numbers) == len(parameter), "shapes differ; call `require` first"
    target = parameter
    if isinstance(parameter, DTensor):
        target = parameter.to_local()
        start = first_row(parameter)
        numbers = numbers[start : start + target.shape[0]]
    indices = numbers >> ROW_BITS
    for index in sorted(set(indices.unique_consecutive().tolist())):
        # Consecutive in the source, as `fuse_qkv` and torch.cat keep the order of a tensor's rows.
        positions = (indices == index).nonzero().flatten()
        first, last = int(positions[0]), int(positions[-1])
        rows = slice(first, last + 1) if last - first < len(positions) else positions
        begin, end = (int(numbers[i]) - (index << ROW_BITS) for i in (first, last))
        values = source.rows(owners[index], begin, end + 1)
        values = region.take_columns(values) if region else values
        if split and parameter.requires_grad and owners[index] in source.fp8:
            values, low = split(values)
            if not hasattr(parameter, "low_half"):
                parameter.low_half = torch.zeros(target.shape, dtype=torch.int16, device=target.device)
            _copy_rows(parameter.low_half, rows, low)
        _copy_rows(target, rows, values)


def _copy_rows(target: Tensor, rows: slice | Tensor, values: Tensor) -> None:
    """Copy values [n, ...] to n rows of `target`; on a GPU, without waiting for the copy."""
    on_gpu = target.is_cuda
    if isinstance(rows, slice):
        target[rows].copy_(values, non_blocking=on_gpu)
    else:
        values = values.to(target.device, non_blocking=on_gpu).to(target.dtype)
        target.index_copy_(0, rows.to(target.device, non_blocking=on_gpu), values)


def first_row(parameter: DTensor) -> int:
    """Return this rank's first row in a tensor sharded along dim 0, with torch.chunk's sizes."""
    start = 0
    for dim, placement in enumerate(parameter.placements):
        if placement.is_shard():
            assert placement.dim == 0, placement
            size = -(-parameter.shape[0] // parameter.device_mesh.size(dim))
            start = min(parameter.device_mesh.get_local_rank(dim) * size, parameter.shape[0])
    return start


@torch.no_grad()
def fill_named(
    parameters: Mapping[str, Tensor],
    source: WeightSource,
    split: Split | None = None,
    regions: Mapping[str, Region | None] = MappingProxyType({}),
) -> None:
    """Fill parameters or their shards from the weights of the same names; `split`, `regions`: see `_fill`."""
    for key, parameter in parameters.items():
        numbered, owners = _number_rows({key: source.shapes()[key]})
        _fill(parameter, numbered[key], owners, source, split, regions.get(key))


@torch.no_grad()
def load_te(
    model: nn.Module,
    source: WeightSource,
    split: Split | None = None,
    loading: Callable[[nn.Module], AbstractContextManager] = nullcontext,
) -> None:
    """Fill a TECausalLM from Hugging Face tensors, cast to the parameters' dtype; see `require` and `_fill`.

    Each rank of a sharded model reads only the rows of its own shards. `loading` is entered for each layer.
    """
    shapes = source.shapes()
    for i, layer in model.layers.named_children():
        prefix = f"model.layers.{i}."
        numbered, owners = _number_rows(
            {key: shape for key, shape in shapes.items() if key.startswith(prefix)}
        )
        layout = layer_to_te({key.removeprefix(prefix): rows for key, rows in numbered.items()}, model.config)
        with loading(layer):
            for name, parameter in base_parameters(layer).items():
                region = model.regions.get(f"layers.{i}.{name}")
                _fill(parameter, layout.pop(name), owners, source, split, region)
        assert not layout, layout.keys()
    modules = {EMBEDDING: model.embed_tokens, FINAL_NORM: model.norm, LM_HEAD: model.lm_head}
    if model.tied:
        del modules[LM_HEAD]
    rest = {key: module.weight for key, module in modules.items() if module}
    fill_named(rest, source, split, {key: model.regions.get(name) for name, key in SPLIT_ROOT.items()})


Gather = Callable[[list[Tensor]], list[Tensor]]  # gathers full tensors from shards, as `Strategy.gather`


def te_to_hf(model: nn.Module, gather: Gather) -> Iterator[tuple[str, Tensor]]:
    """Yield a TECausalLM's weights under Hugging Face names, layer by layer; without `lm_head` if tied."""

    def gather_named(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors = dict(zip(parameters, gather(list(parameters.values())), strict=True))
        if model.tensor is None:
            return tensors
        return {name: model.tensor.gather(part, model.regions.get(name)) for name, part in tensors.items()}

    def gather_root(name: str) -> Tensor:
        return gather_named({name: model.get_parameter(name)})[name]

    if model.embeds:
        yield EMBEDDING, gather_root("embed_tokens.weight")
    for i, layer in model.layers.named_children():
        here = f"layers.{i}."
        tensors = gather_named({here + name: p for name, p in base_parameters(layer).items()})
        tensors = {name.removeprefix(here): tensor for name, tensor in tensors.items()}
        for name, tensor in layer_to_hf(tensors, model.config).items():
            yield f"model.layers.{i}.{name}", tensor
    if not model.has_head:
        return
    yield FINAL_NORM, gather_root("norm.weight")
    if not model.tied:
        yield LM_HEAD, gather_root("lm_head.weight")
