"""The emulated layers that have weights: norm and linear as TE fuses them, in FP8 inside `autocast`.

T tokens, D features in, E features out, F feed-forward size. Linear weights are [out, in].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from te_models.emulation.gemm import LinearFunction, RMSNormFunction, SwiGLUFunction
from te_models.emulation.scaling import Fp8Module, Gemms

INIT_STD = 0.023  # of weights built on a real device, as TE's


def activation_dtype(x: Tensor) -> torch.dtype:
    """What a layer computes in: the dtype of torch.autocast where it is on, else the input's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def parameter(*shape: int, dtype: torch.dtype | None, device: Any, fill: float | None = None) -> nn.Parameter:
    """Drawn from a normal distribution, or filled; left alone on the meta device."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    return nn.Parameter(tensor.normal_(std=INIT_STD) if fill is None else tensor.fill_(fill))


class RMSNorm(nn.Module):
    """Norm over the last side, which `size` long weights scale; in BF16 or the input's precision."""

    def __init__(self, size: int, *, eps: float = 1e-5, dtype: torch.dtype | None = None, device: Any = None):
        super().__init__()
        self.eps = eps
        self.weight = parameter(size, dtype=dtype, device=device, fill=1.0)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.weight.dtype
        return RMSNormFunction.apply(x, self.weight, self.eps, dtype, dtype)


def _norm(x: Tensor, weight: Tensor, eps: float, gemms: Gemms | None) -> Tensor:
    """The norm in front of a linear; in float32 where the linear's cast is fused with it."""
    dtype = activation_dtype(x)
    out = torch.float32 if gemms and gemms.recipe.casts_float32 else dtype
    return RMSNormFunction.apply(x, weight, eps, dtype, out)


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    gemms: Gemms | None,
    amax: Tensor | None = None,
) -> Tensor:
    """[..., D] -> [..., E]."""
    y = LinearFunction.apply(x.flatten(0, -2), weight, bias, dtype, gemms, amax)  # [T, E]
    return y.unflatten(0, x.shape[:-1])


class Linear(Fp8Module):
    """[..., D] -> [..., E] with weight [E, D]."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        params_dtype: torch.dtype | None = None,
        device: Any = None,
    ):
        super().__init__()
        self.weight = parameter(out_features, in_features, dtype=params_dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        (gemms,) = self.gemms(x)
        return _linear(x, self.weight, None, activation_dtype(x), gemms)


class LayerNormLinear(Fp8Module):
    """A linear with weight [E, D], and bias [E] if asked for, on RMSNorm of its input [..., D]."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        normalization: str = "RMSNorm",
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        device: Any = None,
    ):
        super().__init__()
        refuse_other(normalization=(normalization, "RMSNorm"))
        self.eps = eps
        made = {"dtype": params_dtype, "device": device}
        self.layer_norm_weight = parameter(in_features, **made, fill=1.0)
        self.weight = parameter(out_features, in_features, **made)
        self.register_parameter("bias", parameter(out_features, **made, fill=0.0) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        (gemms,) = self.gemms(x)
        normed = _norm(x, self.layer_norm_weight, self.eps, gemms)
        return _linear(normed, self.weight, self.bias, activation_dtype(x), gemms)


class LayerNormMLP(Fp8Module):
    """fc2(swiglu(fc1(RMSNorm(x)))) on [..., D]; fc1_weight [2F, D] with the gate first, fc2_weight [D, F]."""

    num_gemms = 2

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        eps: float = 1e-5,
        params_dtype: torch.dtype | None = None,
        device: Any = None,
    ):
        super().__init__()
        self.eps = eps
        made = {"dtype": params_dtype, "device": device}
        self.layer_norm_weight = parameter(hidden_size, **made, fill=1.0)
        self.fc1_weight = parameter(2 * ffn_hidden_size, hidden_size, **made)
        self.fc2_weight = parameter(hidden_size, ffn_hidden_size, **made)

    def forward(self, x: Tensor) -> Tensor:
        fc1, fc2 = self.gemms(x)
        dtype, recipe = activation_dtype(x), fc2 and fc2.recipe
        hidden = _linear(_norm(x, self.layer_norm_weight, self.eps, fc1), self.fc1_weight, None, dtype, fc1)
        act, amax = SwiGLUFunction.apply(
            hidden,
            torch.float32 if recipe and recipe.casts_float32 else dtype,
            bool(recipe and recipe.scales_float32),
        )  # [..., F]
        return _linear(act, self.fc2_weight, None, dtype, fc2, amax)


def refuse_other(**settings: tuple[Any, Any]) -> None:
    """ValueError for a setting, given with the value it must have, that has another one."""
    wrong = [f"{name}={value!r} (only {only!r})" for name, (value, only) in settings.items() if value != only]
    if wrong:
        raise ValueError(f"--te_backend emulated has no {', '.join(wrong)}")
