"""Gradient accumulation over micro-batches in FP32 for BF16 parameters.

Autograd accumulates in BF16, which loses low-order bits as the sum grows. Here the sum is in `main_grad` (the
name in Megatron and TE), in FP32 by default. TE's wgrad GEMMs accumulate into it directly
(`fuse_wgrad_accumulation`), which saves a pass over memory. Other gradients are added as soon as autograd
computes them: by a hook on one device, by FSDP2 for sharded models.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

GEMM_WEIGHTS = ("weight", "fc1_weight", "fc2_weight")  # names in TE's modules


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return the gradient for the optimizer: `main_grad` if there is one, else `grad`."""
    main = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main


def _fused_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if getattr(module, "fuse_wgrad_accumulation", False)]


def _gemm_weights(module: nn.Module) -> list[Tensor]:
    weights = (getattr(module, name, None) for name in GEMM_WEIGHTS)
    return [weight for weight in weights if weight is not None and weight.requires_grad]


class MainGradAccumulator:
    """Accumulate into `main_grad` of every trainable parameter, for models that are not sharded.

    The buffers of weights in TE's fused modules are permanent, and a step's first micro-batch overwrites
    them. Other buffers are freed after each step.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self.dtype = dtype
        self.fused = [weight for module in _fused_modules(model) for weight in _gemm_weights(module)]
        for weight in self.fused:
            weight.main_grad = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
        fused = {id(weight) for weight in self.fused}
        self.unfused = [p for p in model.parameters() if p.requires_grad and id(p) not in fused]
        for parameter in self.unfused:
            parameter.register_post_accumulate_grad_hook(self._add)

    def _add(self, parameter: nn.Parameter) -> None:
        main = getattr(parameter, "main_grad", None)
        if main is None:
            parameter.main_grad = parameter.grad.to(self.dtype)
        else:
            main += parameter.grad
        parameter.grad = None

    def begin_micro_batch(self, *, first: bool, last: bool) -> None:
        """Prepare a micro-batch. Call before its forward pass, where TE reads `overwrite_main_grad`."""
        for weight in self.fused:
            weight.overwrite_main_grad = first

    def begin_pipeline(self) -> None:
        """Prepare all micro-batches of a step: a layer may be recomputed after others' forward passes."""
        for weight in self.fused:
            weight.overwrite_main_grad = False
            weight.main_grad.zero_()

    def clear(self) -> None:
        """Free the gradients, except the buffers that TE overwrites."""
        for parameter in self.unfused:
            parameter.main_grad = None


class FSDPMainGradAccumulator:
    """Accumulate gradients of TE weights sharded by FSDP2, in `dtype`, into `grad` of the gathered weight.

    FSDP2 reduces this `grad` after the step's last micro-batch, together with the block's other gradients. A
    pre-forward hook sets the attributes on the gathered weight that make TE call `get_main_grad`, as with
    Megatron's FSDP. Autograd's gradients are used with a single micro-batch, and for te.LayerNormLinear,
    whose backward fails if it has to cast its weight again (TE 2.20).
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self.dtype, self.first = dtype, True
        self.modules = []
        self.requested: Tensor | None = None  # weight of TE's last `get_main_grad` call
        for module in _fused_modules(model):
            if type(module).__name__ == "LayerNormLinear":
                module.fuse_wgrad_accumulation = False
            else:
                self.modules.append(module)
                module.register_forward_pre_hook(self._set_hooks_on_weights)

    def begin_micro_batch(self, *, first: bool, last: bool) -> None:
        """Prepare a micro-batch; call before its forward pass."""
        self.first = first
        for module in self.modules:
            module.fuse_wgrad_accumulation = not (first and last)

    def _set_hooks_on_weights(self, module: nn.Module, _: Any) -> None:
        for weight in _gemm_weights(module):
            weight.overwrite_main_grad = self.first
            weight.__fsdp_param__, weight.get_main_grad = True, functools.partial(self._main_grad, weight)
            if not module.fuse_wgrad_accumulation:
                weight.grad_dtype = weight.dtype

    def _main_grad(self, weight: Tensor) -> Tensor:
        self.clear()
        if weight.grad is None:
            weight.grad_dtype = self.dtype
            allocate = torch.empty_like if self.first else torch.zeros_like
            weight.grad = allocate(weight, dtype=self.dtype)
        self.requested = weight
        return weight.grad

    def clear(self) -> None:
        """Drop the last `main_grad`, so that the weight does not keep it after FSDP2 has reduced it."""
        if self.requested is not None:
            self.requested.main_grad = self.requested = None
