"""Weight layouts: Hugging Face <-> Transformer Engine, in both directions, and the sources weights come from.

D hidden size, F feed-forward size, H query heads, G key/value groups, R = H / G queries per group,
K head size, V vocabulary. Linear weights are [out, in].

A load first compares names and shapes with the configuration (`require`): a bias or a norm without a place in
the target stops it instead of being dropped.
"""

from __future__ import annotations

import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from core.errors import UserError, bad_setting, first_line
from te_models.families import FAMILIES, Family

EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def fuse_qkv(q: Tensor, k: Tensor, v: Tensor, *, heads: int, groups: int) -> Tensor:
    """Interleave [H*K, D], [G*K, D], [G*K, D] to [G*(R+2)*K, D]: group by group R queries, a key, a value.

    This is the layout of te.TransformerLayer(fuse_qkv_params=True, qkv_weight_interleaved=True). Biases [H*K]
    and so on are fused alike.
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


# TE's name -> Hugging Face's, of tensors that have the same layout in both.
RENAMED = {
    "self_attention.layernorm_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.proj.weight": "self_attn.o_proj.weight",
    "layernorm_mlp.layer_norm_weight": "post_attention_layernorm.weight",
    "layernorm_mlp.fc2_weight": "mlp.down_proj.weight",
}
QK_NORMS = {f"self_attention.{p}_norm.weight": f"self_attn.{p}_norm.weight" for p in "qk"}


def _renamed(family: Family) -> dict[str, str]:
    return RENAMED | (QK_NORMS if family.qk_norm else {})


def _fused(family: Family) -> tuple[str, ...]:
    return ("weight", "bias") if family.qkv_bias else ("weight",)


def layer_to_te(hf: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Convert a decoder layer's Hugging Face tensors (named after `model.layers.N.`) to TE's.

    Empties `hf`.
    """
    family, heads, groups = _family_and_heads(config)
    te = {name: hf.pop(hf_name) for name, hf_name in _renamed(family).items()}
    for kind in _fused(family):
        q, k, v = (hf.pop(f"self_attn.{p}_proj.{kind}") for p in "qkv")
        te[f"self_attention.layernorm_qkv.{kind}"] = fuse_qkv(q, k, v, heads=heads, groups=groups)
    # TE's SwiGLU gates with the first half: silu(x[:F]) * x[F:].
    gate, up = hf.pop("mlp.gate_proj.weight"), hf.pop("mlp.up_proj.weight")
    te["layernorm_mlp.fc1_weight"] = torch.cat([gate, up])  # [2F, D]
    assert not hf, f"no place in a TE layer: {', '.join(hf)}"
    return te


def layer_to_hf(te: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Invert `layer_to_te` exactly, emptying `te`."""
    family, heads, groups = _family_and_heads(config)
    hf = {hf_name: te.pop(name) for name, hf_name in _renamed(family).items()}
    for kind in _fused(family):
        qkv = split_qkv(te.pop(f"self_attention.layernorm_qkv.{kind}"), heads=heads, groups=groups)
        hf |= {f"self_attn.{p}_proj.{kind}": part for p, part in zip("qkv", qkv, strict=True)}
    gate, up = te.pop("layernorm_mlp.fc1_weight").chunk(2)  # [F, D] each
    hf |= {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}
    assert not te, f"no place in a Hugging Face model: {', '.join(te)}"
    return hf


def _family_and_heads(config: Any) -> tuple[Family, int, int]:
    return FAMILIES[config.model_type], config.num_attention_heads, config.num_key_value_heads


class WeightSource(ABC):
    """Weights by Hugging Face name; `name` identifies the source in errors."""

    name = "random weights"

    @abstractmethod
    def shapes(self) -> dict[str, torch.Size]: ...

    @abstractmethod
    def rows(self, key: str, start: int, stop: int) -> Tensor:
        """Return rows start to stop of a weight [rows, ...]."""

    def get(self, key: str) -> Tensor:
        return self.rows(key, 0, self.shapes()[key][0])

    def require(self, shapes: Mapping[str, torch.Size], *, optional: Collection[str] = ()) -> None:
        """Raise UserError unless these are the weights, save for `optional` ones."""
        own = self.shapes()
        way = "give a complete model with its own config.json"
        if missing := shapes.keys() - own.keys():
            raise bad_setting(f"the weights lack {', '.join(sorted(missing))}; {way}", model_name=self.name)
        if unused := own.keys() - shapes.keys() - {*optional}:
            reason = f"weights without a place in its TE form, {', '.join(sorted(unused))}; drop --use_te"
            raise bad_setting(reason, model_name=self.name)
        for key, shape in shapes.items():
            if own[key] != shape:
                reason = f"{key}: {list(own[key])} in the weights, {list(shape)} by its config.json; {way}"
                raise bad_setting(reason, model_name=self.name)


class RandomSource(WeightSource):
    """Seeded random weights; each tensor depends only on the seed and its own name.

    On one kind of device, TE and Hugging Face models under any sharding and with any dtype therefore start
    from the same weights, which are rounded to BF16 for that purpose. Matrices are N(0, std), norms ones and
    biases zeros, as transformers initialises Llama and Qwen.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], *, seed: int, std: float, device: torch.device):
        self._shapes, self._seed, self._std, self._device = dict(shapes), seed, std, device

    def shapes(self) -> dict[str, torch.Size]:
        return self._shapes

    def rows(self, key: str, start: int, stop: int) -> Tensor:
        shape = self._shapes[key]
        if len(shape) < 2:
            fill = torch.zeros if key.endswith("bias") else torch.ones
            return fill(stop - start, device=self._device)
        # 32 bits: torch's CPU generator ignores the upper half of a seed.
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(f"{self._seed}/{key}".encode()))
        whole = torch.empty(shape, device=self._device).normal_(0.0, self._std, generator=generator)
        return whole[start:stop].bfloat16()


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of a model, which exclude the same weights in other layouts; [] if none."""
    index = folder / INDEX
    if (folder / SINGLE).exists():  # transformers, too, prefers the single file to the index
        return [folder / SINGLE]
    if not index.exists():
        return []
    try:
        return sorted({folder / name for name in json.loads(index.read_bytes())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise unreadable(index, error) from None


def unreadable(path: Path, error: Exception) -> UserError:
    """Return the error for a weight file that is missing or damaged."""
    reason = f"{path.name} cannot be read ({type(error).__name__}: {first_line(error)}); download it again"
    return bad_setting(reason, model_name=path.parent)


class SafetensorsSource(WeightSource):
    """Tensors of a folder's `*.safetensors`, from which only the requested rows are read."""

    def __init__(self, folder: Path):
        self.name, self._slices = str(folder), {}
        if not (files := weight_files(folder)):
            raise bad_setting(
                f"no {SINGLE} or {INDEX} there; give a folder with safetensors weights, or --init random",
                model_name=folder,
            )
        for path in files:
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise unreadable(path, error) from None
            self._slices |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        # Old checkpoints save the RoPE table, which the configuration implies.
        self._slices = {k: v for k, v in self._slices.items() if not k.endswith("rotary_emb.inv_freq")}
        self._shapes = {key: torch.Size(part.get_shape()) for key, part in self._slices.items()}

    def shapes(self) -> dict[str, torch.Size]:
        return self._shapes

    def rows(self, key: str, start: int, stop: int) -> Tensor:
        return self._slices[key][start:stop]


# Loading by row numbers.
#
# A linear weight is [out, in], so every layout conversion above only moves rows. It is therefore run once on
# row numbers instead of rows: each tensor is replaced by arange(rows), with the tensor's own number in the
# upper 32 bits. In the result, position i holds the source row that belongs there. A rank that holds rows
# a to b of a TE parameter reads exactly the rows listed at a to b, without ever holding a whole tensor, and
# no conversion needs a second, sharded implementation.
ROW_BITS = 32


def _number_rows(shapes: Mapping[str, torch.Size]) -> tuple[dict[str, Tensor], dict[int, str]]:
    """Return the row numbers of each tensor, [rows] int64, and the tensor that their upper bits stand for."""
    numbered = {
        name: torch.arange(shape[0]) + (i << ROW_BITS) for i, (name, shape) in enumerate(shapes.items())
    }
    return numbered, dict(enumerate(shapes))


def _fill(parameter: Tensor, numbers: Tensor, owners: dict[int, str], source: WeightSource) -> None:
    """Copy the rows with these numbers, [rows], into `parameter`, or this rank's part into its shard."""
    assert len(numbers) == len(parameter), "`require` compares shapes"
    target = parameter
    if isinstance(parameter, DTensor):
        target = parameter.to_local()
        start = _first_row(parameter)
        numbers = numbers[start : start + target.shape[0]]
    # One read per run of consecutive rows.
    breaks = (numbers.diff() != 1).nonzero().flatten().add(1).tolist()
    done = 0
    for run in numbers.tensor_split(breaks):
        if not len(run):
            continue  # a rank without rows
        first, rows = int(run[0]), len(run)
        begin = first & ((1 << ROW_BITS) - 1)
        target[done : done + rows].copy_(source.rows(owners[first >> ROW_BITS], begin, begin + rows))
        done += rows


def _first_row(parameter: DTensor) -> int:
    """Return where this rank's rows begin in a tensor that is cut along dim 0 as torch.chunk does."""
    start = 0
    for dim, placement in enumerate(parameter.placements):
        if placement.is_shard():
            assert placement.dim == 0, placement
            size = -(-parameter.shape[0] // parameter.device_mesh.size(dim))
            start = min(parameter.device_mesh.get_local_rank(dim) * size, parameter.shape[0])
    return start


@torch.no_grad()
def fill_named(parameters: Mapping[str, Tensor], source: WeightSource) -> None:
    """Fill parameters, whole or sharded, from the weights of the same names."""
    for key, parameter in parameters.items():
        numbered, owners = _number_rows({key: source.shapes()[key]})
        _fill(parameter, numbered[key], owners, source)


@torch.no_grad()
def load_te(model: nn.Module, source: WeightSource) -> None:
    """Fill a TECausalLM from Hugging Face tensors that fit it, casting to the parameters' dtype.

    Each rank of a sharded model reads only the rows of its own shards.
    """
    shapes = source.shapes()
    for i, layer in enumerate(model.layers):
        prefix = f"model.layers.{i}."
        numbered, owners = _number_rows(
            {key: shape for key, shape in shapes.items() if key.startswith(prefix)}
        )
        layout = layer_to_te({key.removeprefix(prefix): rows for key, rows in numbered.items()}, model.config)
        for name, parameter in layer.named_parameters():
            _fill(parameter, layout.pop(name), owners, source)
        assert not layout, layout.keys()
    rest = {EMBEDDING: model.embed_tokens.weight, FINAL_NORM: model.norm.weight}
    if not model.tied:
        rest[LM_HEAD] = model.lm_head.weight
    fill_named(rest, source)


Gather = Callable[[list[Tensor]], list[Tensor]]  # whole tensors from shards; a strategy's `gather`


def te_to_hf(model: nn.Module, gather: Gather) -> Iterator[tuple[str, Tensor]]:
    """Yield a TECausalLM's weights under Hugging Face names, layer by layer; without `lm_head` if tied."""
    yield EMBEDDING, *gather([model.embed_tokens.weight])
    for i, layer in enumerate(model.layers):
        names, parameters = zip(*layer.named_parameters(), strict=True)
        tensors = dict(zip(names, gather(list(parameters)), strict=True))
        for name, tensor in layer_to_hf(tensors, model.config).items():
            yield f"model.layers.{i}.{name}", tensor
    yield FINAL_NORM, *gather([model.norm.weight])
    if not model.tied:
        yield LM_HEAD, *gather([model.lm_head.weight])
