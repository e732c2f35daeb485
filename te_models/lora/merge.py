"""Trained adapters as peft reads them, and merged into the weights that they adapt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from fp8_suite.te_models.lora.adapters import NAMES, hf_adapters
from fp8_suite.te_models.lora.settings import LoraConfig
from torch import Tensor, nn

Adapters = dict[str, tuple[Tensor, Tensor]]  # A [rank, in] and B [out, rank] by linear layer


def gather_adapters(model: nn.Module, gather: Callable[[list[Tensor]], list[Tensor]]) -> Adapters:
    """Return whole adapters by the Hugging Face name of their linear layer. Collective."""
    modules = hf_adapters(model).items()
    return {name: tuple(gather([getattr(module, part) for part in NAMES])) for name, module in modules}


def merged(
    tensors: Iterable[tuple[str, Tensor]], adapters: Adapters, scaling: float
) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's tensors, with W + scaling * B A in FP32 in place of each adapted weight W."""
    for name, tensor in tensors:
        layer = name.removesuffix(".weight")
        if name != layer and layer in adapters:
            a, b = (part.to(tensor.device, torch.float32) for part in adapters[layer])
            tensor = torch.addmm(tensor.float(), b, a, alpha=scaling)
        yield name, tensor


def peft_tensors(adapters: Adapters) -> dict[str, Tensor]:
    """Return the tensors of peft's adapter_model.safetensors."""
    return {
        f"base_model.model.{name}.lora_{letter}.weight": tensor
        for name, pair in adapters.items()
        for letter, tensor in zip("AB", pair, strict=True)
    }


def peft_config(adapters: Adapters, lora: LoraConfig, *, base: str, layers: int) -> dict[str, Any]:
    """Return peft's adapter_config.json for the model `base` with this number of decoder layers."""
    number = Counter(name.rpartition(".")[2] for name in adapters)
    in_all_layers = all(count == layers for count in number.values())
    alpha = lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(Path(base).resolve()) if Path(base).exists() else base,
        "r": lora.lora_rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": lora.lora_dropout,
        "target_modules": sorted(number) if in_all_layers else list(adapters),
        "bias": "none",
        "inference_mode": True,
    }
