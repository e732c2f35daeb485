"""Weight sources: weights by Hugging Face name, from files, from tensors, or random.

Before loading, `require` compares names and shapes with the configuration: a bias or norm that TE layers
lack is an error and never dropped silently.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from fp8_suite.core.errors import UserError, bad_setting, first_line
from fp8_suite.core.readers import parse_json
from fp8_suite.te_models.quantized.noise import generator_of, noise_of
from fp8_suite.te_models.quantized.reader import QuantizedReader
from safetensors import SafetensorError, safe_open
from torch import Tensor

COMPLETE = "give a complete model with its own config.json"


def other_shape(model_name: str, key: str, stored: Sequence[int], expected: Sequence[int]) -> UserError:
    """Return the error for a stored tensor whose shape is not the configuration's."""
    reason = f"{key}: {list(stored)} in the weights, {list(expected)} by its config.json; {COMPLETE}"
    return bad_setting(reason, model_name=model_name)


def missing_weights(model_name: str, names: Iterable[str]) -> UserError:
    """Return the error for tensors that the weights lack."""
    return bad_setting(f"the weights lack {', '.join(sorted(names))}; {COMPLETE}", model_name=model_name)


class WeightSource(ABC):
    """Weights by Hugging Face name; `name` identifies the source in errors."""

    name = "random weights"
    fp8: Collection[str] = ()  # weights stored in FP8, which `rows` dequantizes to FP32
    on_one_grid: Collection[str] = ()  # those with one scale, or whose scales differ by powers of two
    _shapes: dict[str, torch.Size]

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shape of every weight by name."""
        return self._shapes

    @abstractmethod
    def rows(self, key: str, start: int, stop: int) -> Tensor:
        """Return rows start to stop of a weight [rows, ...]."""

    def get(self, key: str) -> Tensor:
        """Return the whole weight."""
        return self.rows(key, 0, self.shapes()[key][0])

    def require(self, shapes: Mapping[str, torch.Size], *, optional: Collection[str] = ()) -> None:
        """Raise UserError unless names and shapes match; weights in `optional` may be present too."""
        available = self.shapes()
        if missing := shapes.keys() - available.keys():
            raise missing_weights(self.name, missing)
        if unused := available.keys() - shapes.keys() - {*optional}:
            reason = f"its TE layers have no place for {', '.join(sorted(unused))}; drop --use_te"
            raise bad_setting(reason, model_name=self.name)
        for key, shape in shapes.items():
            if available[key] != shape:
                raise other_shape(self.name, key, available[key], shape)


class RandomSource(WeightSource):
    """Seeded random weights; each tensor depends only on the seed, its name and the device type.

    TE and Hugging Face models therefore start from the same weights under any sharding and dtype; values are
    rounded to BF16 so that they are the same in every dtype. Matrices are N(0, std), norms ones and biases
    zeros, as in transformers' Llama and Qwen.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], *, seed: int, std: float, device: torch.device):
        self._shapes, self._seed, self._std, self._device = dict(shapes), seed, std, device

    def rows(self, key: str, start: int, stop: int) -> Tensor:
        shape = self._shapes[key]
        if len(shape) < 2:
            fill = torch.zeros if key.endswith("bias") else torch.ones
            return fill(stop - start, device=self._device)
        generator = generator_of(self._seed, key, self._device)
        weight = torch.empty(shape, device=self._device).normal_(0.0, self._std, generator=generator)
        return weight[start:stop].bfloat16()


class TensorSource(WeightSource):
    """Weights in memory."""

    name = "this model"

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._tensors, self._shapes = tensors, {key: tensor.shape for key, tensor in tensors.items()}

    def rows(self, key: str, start: int, stop: int) -> Tensor:
        return self._tensors[key][start:stop]


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
QUANTIZED = ("I8", "F8_E4M3", "F8_E5M2")  # safetensors' dtypes of weights that need scales


def weight_files(folder: Path) -> list[Path]:
    """List a model's safetensors shards, without duplicates such as consolidated*; [] if there are none."""
    index = folder / INDEX
    if (folder / SINGLE).exists():  # transformers prefers the single file too
        return [folder / SINGLE]
    if not index.exists():
        return []
    try:
        return sorted({folder / name for name in parse_json(index.read_bytes())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise unreadable(index, error) from None


def unreadable(path: Path, error: Exception) -> UserError:
    """Return the error for a weight file that is missing or damaged."""
    reason = f"{path.name} cannot be read ({type(error).__name__}: {first_line(error)}); download it again"
    return bad_setting(reason, model_name=path.parent)


class SafetensorsSource(WeightSource):
    """Tensors of a folder's `*.safetensors`; reads only the requested rows.

    With a `quantization_config`, scales are hidden, and FP8 tensors multiplied by them in FP32 on `device`.
    With a `dither_seed`, those `on_one_grid` lie anywhere in their rounding intervals, not in the middle.
    """

    def __init__(
        self,
        folder: Path,
        quantization: dict[str, Any] | None = None,
        device: Any = "cpu",
        dither_seed: int | None = None,
    ):
        self.name, self._slices = str(folder), {}
        self._device, self._dither_seed = device, dither_seed
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
        hidden: Collection[str] = ()
        if quantization:
            self._reader = QuantizedReader(self.name, self._slices, quantization)
            self.fp8, hidden = self._reader.scales, self._reader.hidden
            self.on_one_grid = self._reader.on_one_grid
        for key, part in self._slices.items():
            if not quantization and (dtype := part.get_dtype()) in QUANTIZED:
                reason = f"{key} is {dtype}, and its config.json has no quantization_config"
                raise bad_setting(f"{reason}; give the original model", model_name=folder)
        # Old checkpoints contain the RoPE table, which is computed from the configuration.
        self._shapes = {
            key: torch.Size(part.get_shape())
            for key, part in self._slices.items()
            if not key.endswith("rotary_emb.inv_freq") and key not in hidden
        }

    def rows(self, key: str, start: int, stop: int) -> Tensor:
        if key not in self.fp8:
            return self._slices[key][start:stop]
        noise = None
        if self._dither_seed is not None and key in self.on_one_grid:
            whole = noise_of(self._dither_seed, key, self._shapes[key], self._device)
            noise = whole[start:stop]  # the same in every sharding
        return self._reader.rows(key, start, stop, self._device, noise)
