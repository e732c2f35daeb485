"""Weight layouts: Hugging Face <-> Transformer Engine, pure torch, in both directions.

Letters: D hidden size, F feed-forward size, H query heads, G key/value groups, R = H / G queries per group,
K head size, V vocabulary. Linear weights are [out, in].

Conversions `pop` every key they use and fail if one is left over: a bias or a norm that the target has no
place for stops the load instead of being dropped.
"""

from __future__ import annotations

import json
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from core.errors import first_line
from te_models.families import Family

EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def fuse_qkv(q: Tensor, k: Tensor, v: Tensor, *, heads: int, groups: int) -> Tensor:
    """[H*K, D], [G*K, D], [G*K, D] -> [G*(R+2)*K, D]: group by group R queries, one key, one value.

    The layout of te.TransformerLayer(fuse_qkv_params=True, qkv_weight_interleaved=True). Works on biases
    ([H*K] and so on) alike.
    """
    size, rest = q.shape[0] // heads, q.shape[1:]
    q = q.reshape(groups, heads // groups, size, *rest)  # [G, R, K, D]
    k = k.reshape(groups, 1, size, *rest)  # [G, 1, K, D]
    v = v.reshape(groups, 1, size, *rest)  # [G, 1, K, D]
    return torch.cat([q, k, v], dim=1).flatten(0, 2)  # [G*(R+2)*K, D]


def split_qkv(qkv: Tensor, *, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inverse of `fuse_qkv`: [G*(R+2)*K, D] -> [H*K, D], [G*K, D], [G*K, D]."""
    per_group = heads // groups
    size, rest = qkv.shape[0] // (groups * (per_group + 2)), qkv.shape[1:]
    qkv = qkv.reshape(groups, per_group + 2, size, *rest)  # [G, R+2, K, D]
    q, k, v = qkv.split([per_group, 1, 1], dim=1)
    return q.flatten(0, 2), k.flatten(0, 2), v.flatten(0, 2)


# TE's names of tensors that both sides hold alike, and Hugging Face's.
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


def layer_to_te(hf: dict[str, Tensor], *, heads: int, groups: int, family: Family) -> dict[str, Tensor]:
    """One decoder layer's Hugging Face tensors (names after `model.layers.N.`) in TE's names and layout.

    Takes them out of `hf`, where what it has no place for is left; KeyError if one is missing.
    """
    te = {name: hf.pop(hf_name) for name, hf_name in _renamed(family).items()}
    for kind in _fused(family):
        q, k, v = (hf.pop(f"self_attn.{p}_proj.{kind}") for p in "qkv")
        te[f"self_attention.layernorm_qkv.{kind}"] = fuse_qkv(q, k, v, heads=heads, groups=groups)
    # TE's swiglu gates with the first half: silu(x[:F]) * x[F:].
    gate_and_up = [hf.pop("mlp.gate_proj.weight"), hf.pop("mlp.up_proj.weight")]
    te["layernorm_mlp.fc1_weight"] = torch.cat(gate_and_up)  # [2F, D]
    return te


def layer_to_hf(te: dict[str, Tensor], *, heads: int, groups: int, family: Family) -> dict[str, Tensor]:
    """Inverse of `layer_to_te`, exact. Empties `te`; ValueError if a tensor is left over."""
    hf = {hf_name: te.pop(name) for name, hf_name in _renamed(family).items()}
    for kind in _fused(family):
        qkv = split_qkv(te.pop(f"self_attention.layernorm_qkv.{kind}"), heads=heads, groups=groups)
        hf |= {f"self_attn.{p}_proj.{kind}": part for p, part in zip("qkv", qkv, strict=True)}
    gate, up = te.pop("layernorm_mlp.fc1_weight").chunk(2)
    hf |= {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}
    if te:
        raise ValueError(f"weights without a place in a Hugging Face model: {', '.join(sorted(te))}")
    return hf


class WeightSource(ABC):
    """Where a model's weights come from, by Hugging Face name; `name` is what errors call it."""

    name = "random weights"

    @abstractmethod
    def shapes(self) -> dict[str, torch.Size]: ...

    @abstractmethod
    def rows(self, key: str, start: int, stop: int) -> Tensor:
        """Rows start to stop of a weight [rows, ...]."""

    def get(self, key: str) -> Tensor:
        return self.rows(key, 0, self.shapes()[key][0])


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """Those that a model is read from; beside them may be the same weights in other layouts."""
    names = sorted({*(_indexed(folder) or {}).values()}) or [SINGLE]
    return [folder / name for name in names if (folder / name).exists()]


def _indexed(folder: Path) -> dict[str, str] | None:
    """Tensor -> file, of weights in several files; None without their index, or where one file has all."""
    index = folder / INDEX
    if (folder / SINGLE).exists() or not index.exists():  # transformers, too, takes the one file first
        return None
    try:
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(f"--model_name {folder}: {INDEX} is damaged ({reason}); download it again") from None


def require_safetensors(folder: Path) -> dict[str, str] | None:
    """Tensor -> file; None if all are in one. ValueError if a TE model's files are not all in `folder`."""
    files = _indexed(folder)
    if files is None and not (folder / SINGLE).exists():
        raise ValueError(
            f"--model_name {folder}: no {SINGLE} or {INDEX} there; give a folder with safetensors weights, "
            "or --init random"
        )
    missing = sorted({name for name in (files or {}).values() if not (folder / name).exists()})
    if missing:
        raise ValueError(f"--model_name {folder}: weight file {missing[0]} is missing; download it again")
    return files


class SafetensorsSource(WeightSource):
    """Tensors of a folder's `*.safetensors`, of which only the rows asked for are read from disk."""

    def __init__(self, folder: Path):
        self.name = str(folder)
        files = require_safetensors(folder)
        if files is None:
            with _readable(folder / SINGLE), safe_open(folder / SINGLE, framework="pt") as handle:
                files = dict.fromkeys(handle.keys(), SINGLE)
        # Old checkpoints carry RoPE tables as weights; they follow from the configuration.
        self._files = {k: folder / f for k, f in files.items() if not k.endswith("rotary_emb.inv_freq")}
        self._open: dict[Path, Any] = {}
        self._shapes = {key: torch.Size(self._slice(key).get_shape()) for key in self._files}

    def shapes(self) -> dict[str, torch.Size]:
        return self._shapes

    def rows(self, key: str, start: int, stop: int) -> Tensor:
        return self._slice(key)[start:stop]

    def _slice(self, key: str) -> Any:
        path = self._files[key]
        with _readable(path):
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt")
            return self._open[path].get_slice(key)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise ValueError(
            f"--model_name {path.parent}: {path.name} is damaged ({first_line(error)}); download it again"
        ) from None


class RandomSource(WeightSource):
    """Seeded random weights: each tensor depends on the seed and its own name alone.

    So TE and Hugging Face models, any sharding, and any dtype of weights, for which they are rounded to BF16,
    start from the same weights on the same kind of device. Matrices are N(0, std), norms ones, biases zeros,
    as transformers initialises Llama and Qwen.
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


def _layer_names(keys: Iterable[str], layer: int) -> dict[str, str]:
    prefix = f"model.layers.{layer}."
    return {key[len(prefix) :]: key for key in keys if key.startswith(prefix)}


@torch.no_grad()
def load_te(model: nn.Module, source: WeightSource) -> None:
    """Fill a TECausalLM from Hugging Face tensors, casting to the parameters' dtype.

    Of a sharded model each rank reads the rows of its own shards. ValueError if the source and the model
    differ.
    """
    shapes = source.shapes()
    left = set(shapes)
    deepest = max((int(m[1]) for k in left if (m := re.match(r"model\.layers\.(\d+)\.", k))), default=-1)
    if deepest + 1 != len(model.layers):
        raise ValueError(
            f"--model_name {source.name}: the weights have {deepest + 1} decoder layers, the configuration "
            f"{len(model.layers)}; give a complete model with its own config.json"
        )
    for i, layer in enumerate(model.layers):
        names = _layer_names(left, i)
        numbered, owners = _number_rows({suffix: shapes[key] for suffix, key in names.items()})
        try:
            layout = layer_to_te(numbered, heads=model.heads, groups=model.groups, family=model.family)
        except KeyError as missing:
            raise _lacking(source, [f"model.layers.{i}.{missing.args[0]}"]) from None
        except RuntimeError:  # of a reshape
            raise ValueError(
                f"--model_name {source.name}: model.layers.{i}.self_attn.q_proj, k_proj and v_proj have not "
                "the rows of the heads in its config.json; give a model with its own config.json"
            ) from None
        _refuse_leftovers(source, [names[suffix] for suffix in numbered])
        for name, parameter in layer.named_parameters():
            _fill(parameter, layout.pop(name), {n: names[suffix] for n, suffix in owners.items()}, source)
        assert not layout, layout.keys()
        left -= set(names.values())
    rest = {"embed_tokens.weight": EMBEDDING, "norm.weight": FINAL_NORM}
    if model.tied:
        left.discard(LM_HEAD)  # some tied checkpoints store the shared matrix twice
    else:
        rest["lm_head.weight"] = LM_HEAD
    absent = [key for key in rest.values() if key not in left]
    if absent:
        raise _lacking(source, absent)
    fill_named({key: model.get_parameter(name) for name, key in rest.items()}, source)
    _refuse_leftovers(source, left - set(rest.values()))


def _lacking(source: WeightSource, names: Iterable[str]) -> ValueError:
    return ValueError(
        f"--model_name {source.name}: the weights lack {', '.join(names)}; give a complete model"
    )


def _refuse_leftovers(source: WeightSource, names: Iterable[str]) -> None:
    if names:
        listed = ", ".join(sorted(names))
        raise ValueError(
            f"--model_name {source.name}: weights without a place in its TE form, {listed}; drop --use_te"
        )


@torch.no_grad()
def fill_named(parameters: Mapping[str, Tensor], source: WeightSource) -> None:
    """Fill parameters, whole or sharded, from the weights of these names."""
    shapes = source.shapes()
    for key, parameter in parameters.items():
        numbered, owners = _number_rows({key: shapes[key]})
        _fill(parameter, numbered[key], owners, source)


def _number_rows(shapes: Mapping[str, torch.Size]) -> tuple[dict[str, Tensor], dict[int, str]]:
    """A number for every row of every tensor, [rows] each, and the tensor that owns a number's upper bits.

    What a layout conversion does to these numbers it does to the rows, so it also tells which rows of which
    tensors a part of its result is made of.
    """
    numbered, owners = {}, {}
    for i, (name, shape) in enumerate(shapes.items()):
        rows = max([1, *shape[:1]])  # what has none fits nowhere, and needs a number to be told
        numbered[name] = torch.arange(rows) + (i << ROW_BITS)
        owners[i] = name
    return numbered, owners


ROW_BITS = 32


def _fill(parameter: Tensor, numbers: Tensor, owners: dict[int, str], source: WeightSource) -> None:
    """Copy the rows of these numbers, [rows], into `parameter`; into a shard, this rank's part of them."""
    shapes = source.shapes()
    width = shapes[owners[int(numbers[0]) >> ROW_BITS]][1:]
    if parameter.shape != (len(numbers), *width):
        names = ", ".join(sorted({owners[int(n)] for n in (numbers >> ROW_BITS).unique()}))
        raise ValueError(
            f"--model_name {source.name}: {names}: {[len(numbers), *width]} in the weights, "
            f"{list(parameter.shape)} by its config.json; give a model with its own config.json"
        )
    target = parameter
    if isinstance(parameter, DTensor):
        target = parameter.to_local()
        start = _first_row(parameter)
        numbers = numbers[start : start + target.shape[0]]
    # One read for each stretch of neighbouring rows.
    borders = (numbers.diff() != 1).nonzero().flatten().add(1).tolist()
    done = 0
    for run in numbers.tensor_split(borders):
        if not len(run):
            continue  # more ranks than rows
        first, rows = int(run[0]), len(run)
        begin = first & ((1 << ROW_BITS) - 1)
        target[done : done + rows].copy_(source.rows(owners[first >> ROW_BITS], begin, begin + rows))
        done += rows


def _first_row(parameter: DTensor) -> int:
    """Where this rank's rows begin in a tensor that is cut along dim 0 as torch.chunk does."""
    start = 0
    for dim, placement in enumerate(parameter.placements):
        if placement.is_shard():
            assert placement.dim == 0, placement
            size = -(-parameter.shape[0] // parameter.device_mesh.size(dim))
            start = min(parameter.device_mesh.get_local_rank(dim) * size, parameter.shape[0])
    return start


Gather = Callable[[list[Tensor]], list[Tensor]]  # whole tensors from shards; a strategy's `gather`


def te_to_hf(model: nn.Module, gather: Gather) -> Iterator[tuple[str, Tensor]]:
    """A TECausalLM's weights under Hugging Face names, one layer at a time; `lm_head` is left out if tied."""
    yield EMBEDDING, *gather([model.embed_tokens.weight])
    for i, layer in enumerate(model.layers):
        names, parameters = zip(*layer.named_parameters(), strict=True)
        tensors = dict(zip(names, gather(list(parameters)), strict=True))
        shape = {"heads": model.heads, "groups": model.groups, "family": model.family}
        for name, tensor in layer_to_hf(tensors, **shape).items():
            yield f"model.layers.{i}.{name}", tensor
    yield FINAL_NORM, *gather([model.norm.weight])
    if not model.tied:
        yield LM_HEAD, *gather([model.lm_head.weight])
