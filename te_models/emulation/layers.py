"""Emulated TE modules with weights: RMSNorm, Linear and the fused modules, in FP8 inside `autocast`.

Under tensor parallelism, which is always with sequence parallelism, a module of mode "column" gathers its
input from all ranks and computes a part of its output features; one of mode "row" reads a part of its input
features and leaves to each rank its part of the summed tokens. Inputs are gathered before their cast, so a
scale is of all tokens; TE reduces amaxes to the same effect.

T tokens, D input features, E output features, F feed-forward size. Linear weights are [out, in].
"""

from __future__ import annotations

from typing import Any

import torch
from fp8_suite.te_models.emulation.gemm import LinearFunction, RMSNormFunction, SwiGLUFunction
from fp8_suite.te_models.emulation.scaling import Fp8Module
from fp8_suite.te_models.parallel.sequence_parallel import gather_tokens, scatter_tokens
from torch import Tensor, nn

INIT_STD = 0.023  # TE's default for weights that are not on the meta device


def activation_dtype(x: Tensor, default: torch.dtype | None = None) -> torch.dtype:
    """Return the compute dtype of a layer: torch.autocast's, otherwise `default` or the input's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else default or x.dtype


def parameter(
    *shape: int, fill: float | None = None, params_dtype: torch.dtype | None = None, device: Any = None
) -> nn.Parameter:
    """Create a parameter with the value `fill`, or normally distributed."""
    tensor = torch.empty(shape, dtype=params_dtype, device=device)
    return nn.Parameter(tensor.normal_(std=INIT_STD) if fill is None else tensor.fill_(fill))


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension, in the dtype of torch.autocast or of the weight [D]."""

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype | None = None, device: Any = None):
        super().__init__()
        self.eps = eps
        self.weight = parameter(size, fill=1.0, params_dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        dtype = activation_dtype(x, self.weight.dtype)
        return RMSNormFunction.apply(x, self.weight, self.eps, dtype, dtype)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """Map [..., D] to [..., E]; `rest` is the activation dtype, a Gemm, and the amax of x or None."""
    y = LinearFunction.apply(x.flatten(0, -2), weight, bias, *rest)  # [T, E]
    return y.unflatten(0, x.shape[:-1])


class Linear(Fp8Module):
    """Linear layer with weight [E, D], and bias [E] if `bias`; takes `params_dtype` and `device`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        tp_group: Any = None,  # mode "row"
        tp_size: int = 1,
        **factory_kwargs: Any,
    ):
        super().__init__()
        self.tp_group = tp_group
        in_features //= tp_size
        self.weight = parameter(out_features, in_features, **factory_kwargs)
        self.register_parameter("bias", parameter(out_features, **factory_kwargs, fill=0.0) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        dtype, (gemm,) = activation_dtype(x), self.gemms(x)
        y = _linear(x.to(dtype), self.weight, self.bias, dtype, gemm, None)
        return scatter_tokens(y, self.tp_group) if self.tp_group else y


class LayerNormLinear(Fp8Module):
    """RMSNorm and a linear layer with weight [E, D], and bias [E] if `bias`: [..., D] -> [..., E]."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        tp_group: Any = None,  # mode "column"
        tp_size: int = 1,
        # For TE's signature; nothing else is emulated.
        normalization: str = "RMSNorm",
        parallel_mode: str = "column",
        sequence_parallel: bool = True,
        **factory_kwargs: Any,
    ):
        super().__init__()
        self.eps, self.tp_group = eps, tp_group
        out_features //= tp_size
        self.layer_norm_weight = parameter(in_features, **factory_kwargs, fill=1.0)
        self.weight = parameter(out_features, in_features, **factory_kwargs)
        self.register_parameter("bias", parameter(out_features, **factory_kwargs, fill=0.0) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        dtype, (gemm,) = activation_dtype(x), self.gemms(x)
        cast_from = torch.float32 if gemm.recipe.casts_float32 else dtype
        normed = RMSNormFunction.apply(x, self.layer_norm_weight, self.eps, dtype, cast_from)
        normed = gather_tokens(normed, self.tp_group) if self.tp_group else normed
        return _linear(normed, self.weight, self.bias, dtype, gemm, None)


class LayerNormMLP(Fp8Module):
    """fc2(swiglu(fc1(RMSNorm(x)))) for x [..., D]; fc1_weight [2F, D] is gate, up; fc2_weight [D, F]."""

    num_gemms = 2

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        eps: float = 1e-5,
        tp_group: Any = None,
        tp_size: int = 1,
        **factory_kwargs: Any,
    ):
        super().__init__()
        self.eps, self.tp_group = eps, tp_group
        ffn_hidden_size //= tp_size
        self.layer_norm_weight = parameter(hidden_size, **factory_kwargs, fill=1.0)
        self.fc1_weight = parameter(2 * ffn_hidden_size, hidden_size, **factory_kwargs)
        self.fc2_weight = parameter(hidden_size, ffn_hidden_size, **factory_kwargs)

    def forward(self, x: Tensor) -> Tensor:
        dtype, (fc1, fc2) = activation_dtype(x), self.gemms(x)
        cast_from = torch.float32 if fc1.recipe.casts_float32 else dtype
        normed = RMSNormFunction.apply(x, self.layer_norm_weight, self.eps, dtype, cast_from)
        normed = gather_tokens(normed, self.tp_group) if self.tp_group else normed
        hidden = _linear(normed, self.fc1_weight, None, dtype, fc1, None)  # [..., 2F]
        act, amax = SwiGLUFunction.apply(hidden, cast_from, fc2.recipe.scales_float32)  # [..., F]
        y = _linear(act, self.fc2_weight, None, dtype, fc2, amax)
        return scatter_tokens(y, self.tp_group) if self.tp_group else y
