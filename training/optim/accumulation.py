"""Gradients summed over the micro-batches of a step, apart from BF16 parameters.

Autograd sums in the parameter's own BF16, which drops more low-order bits the larger the sum grows. Here the
sum is `main_grad`, Megatron's and TE's name, in FP32 by default. TE's GEMMs add to it as they multiply
(`fuse_wgrad_accumulation`), which saves a pass over memory. Other gradients are added as soon as autograd has
them: by a hook on one device, by FSDP2 where it shards the model.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

GEMM_WEIGHTS = ("weight", "fc1_weight", "fc2_weight")  # names in TE's modules


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return the gradient to step from: the sum over micro-batches if there is one, else autograd's."""
    main = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main


def _fused_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if getattr(module, "fuse_wgrad_accumulation", False)]


def _gemm_weights(module: nn.Module) -> list[Tensor]:
    weights = (getattr(module, name, None) for name in GEMM_WEIGHTS)
    return [weight for weight in weights if weight is not None and weight.requires_grad]


class MainGradAccumulator:
    """Sums in `main_grad` of every trainable parameter, for models that are not sharded.

    The sums of weights in TE's fused modules live as long as the model, and a step's first micro-batch
    overwrites them; the others are freed after each step.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self.dtype = dtype
        self.fused = [weight for module in _fused_modules(model) for weight in _gemm_weights(module)]
        for weight in self.fused:
            weight.main_grad = torch.zeros_like(weight, dtype=dtype)
        fused = {id(weight) for weight in self.fused}
        self.others = [p for p in model.parameters() if p.requires_grad and id(p) not in fused]
        for parameter in self.others:
            parameter.register_post_accumulate_grad_hook(self._add)

    def _add(self, parameter: nn.Parameter) -> None:
        main = getattr(parameter, "main_grad", None)
        if main is None:
            parameter.main_grad = parameter.grad.to(self.dtype)
        else:
            main += parameter.grad
        parameter.grad = None

    def begin_micro_batch(self, *, first: bool, last: bool) -> None:
        """Prepare a micro-batch; call before its forward pass, in which TE reads `overwrite_main_grad`."""
        for weight in self.fused:
            weight.overwrite_main_grad = first

    def clear(self) -> None:
        """Free the step's sums, except those that TE overwrites."""
        for parameter in self.others:
            parameter.main_grad = None


class FSDPMainGradAccumulator:
    """Sums of TE's weights that FSDP2 shards: the `grad` of the gathered weight, in `dtype`.

    FSDP2 reduces that `grad` after the step's last micro-batch, as if autograd had made it, with the sums
    that it keeps of the block's other gradients. It puts the gathered weight into the module for each
    forward pass; a pre-forward hook then sets the attributes that make TE call `get_main_grad`, as for
    Megatron's FSDP. With one micro-batch there is nothing to add, and autograd's gradients remain. They
    remain too for te.LayerNormLinear, which fails in backward where it has to cast its weight again (TE
    2.20).
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self.dtype, self.first = dtype, True
        self.modules = []
        self.requested: Tensor | None = None  # weight whose sum TE requested last
        for module in _fused_modules(model):
            if type(module).__name__ == "LayerNormLinear":
                module.fuse_wgrad_accumulation = False
            else:
                self.modules.append(module)
                module.register_forward_pre_hook(self._offer_sums)

    def begin_micro_batch(self, *, first: bool, last: bool) -> None:
        """Prepare a micro-batch; call before its forward pass."""
        self.first = first
        for module in self.modules:
            module.fuse_wgrad_accumulation = not (first and last)

    def _offer_sums(self, module: nn.Module, _: Any) -> None:
        for weight in _gemm_weights(module):
            weight.overwrite_main_grad = self.first
            weight.__fsdp_param__, weight.get_main_grad = True, functools.partial(self._sum_of, weight)
            if not module.fuse_wgrad_accumulation:
                weight.grad_dtype = weight.dtype

    def _sum_of(self, weight: Tensor) -> Tensor:
        self.clear()
        if weight.grad is None:
            weight.grad_dtype = self.dtype
            allocate = torch.empty_like if self.first else torch.zeros_like
            weight.grad = allocate(weight, dtype=self.dtype)
        self.requested = weight
        return weight.grad

    def clear(self) -> None:
        """Release the sum that TE requested last, which it would keep as `main_grad` after FSDP2 is done."""
        if self.requested is not None:
            self.requested.main_grad = self.requested = None
