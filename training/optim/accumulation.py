"""Sums of gradients over the micro-batches of a step, beside BF16 parameters.

Autograd adds in the parameter's own BF16, where the eighth micro-batch loses the bits that the first seven
have grown to. Here sums are `main_grad`, in FP32 unless told otherwise. Into those of TE's GEMM weights TE's
kernels add as they multiply, which saves a pass over memory; others are added as soon as autograd has them,
here on one device, by FSDP2 where it shards the model.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

TE_WEIGHTS = ("weight", "fc1_weight", "fc2_weight")


def fusing(model: nn.Module) -> list[nn.Module]:
    """Modules of TE's that were told to add gradients of their weights up."""
    return [module for module in model.modules() if getattr(module, "fuse_wgrad_accumulation", False)]


def te_weights(module: nn.Module) -> list[Tensor]:
    """Weights of TE's `module` that are trained."""
    weights = (getattr(module, name, None) for name in TE_WEIGHTS)
    return [weight for weight in weights if weight is not None and weight.requires_grad]


def gradient_of(parameter: Tensor) -> Tensor | None:
    """What an optimizer is to read: the sum over micro-batches where one is kept, else autograd's own."""
    main = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main


class MicroBatchSums:
    """Keeps `main_grad` of `dtype` for every trainable parameter of `model`.

    The sums of weights in modules with TE's `fuse_wgrad_accumulation` live as long as the model, since a
    step's first micro-batch overwrites them; the others are freed after each step.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self.fused = [weight for module in fusing(model) for weight in te_weights(module)]
        for weight in self.fused:
            weight.main_grad = torch.zeros_like(weight, dtype=dtype)
        known = {id(weight) for weight in self.fused}
        self.others = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
        self.dtype = dtype
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
        """To be called before the forward, in which TE notes what backward is to do with the sums."""
        for weight in self.fused:
            weight.overwrite_main_grad = first

    def clear(self) -> None:
        """Forget the step's sums; TE's are overwritten by the next one's."""
        for parameter in self.others:
            parameter.main_grad = None


class GatheredSums:
    """Sums of `dtype` of TE's weights that FSDP2 shards: each is the `grad` of the gathered weight.

    FSDP2 takes that as if autograd had made it, after the step's last micro-batch, with what it has added up
    of the block's other gradients. A gathered weight is known in its module's forward alone, where FSDP2 has
    put it; there TE is told to ask for the sum when it multiplies, as it asks Megatron's FSDP. A step of one
    micro-batch has nothing to add, and gradients as without this; so has te.LayerNormLinear, which does not
    ask where it casts its weight anew in backward, and stumbles (TE 2.20).
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self.dtype, self.first = dtype, True
        self.modules = []
        for module in fusing(model):
            if type(module).__name__ == "LayerNormLinear":
                module.fuse_wgrad_accumulation = False
            else:
                self.modules.append(module)
                module.register_forward_pre_hook(self._tell)
        self.asked: Tensor | None = None

    def begin_micro_batch(self, *, first: bool, last: bool) -> None:
        """To be called before the forward."""
        self.first = first
        for module in self.modules:
            module.fuse_wgrad_accumulation = not (first and last)

    def _tell(self, module: nn.Module, _: Any) -> None:
        for weight in te_weights(module):
            weight.overwrite_main_grad = self.first
            weight.__fsdp_param__, weight.get_main_grad = True, functools.partial(self._sum_of, weight)
            if not module.fuse_wgrad_accumulation:
                weight.grad_dtype = weight.dtype

    def _sum_of(self, weight: Tensor) -> Tensor:
        self.clear()
        if weight.grad is None:
            weight.grad_dtype = self.dtype
            make = torch.empty_like if self.first else torch.zeros_like
            weight.grad = make(weight, dtype=self.dtype)
        self.asked = weight
        return weight.grad

    def clear(self) -> None:
        """Let go of the sum that TE was given last, and keeps as `main_grad` when FSDP2 has done with it."""
        if self.asked is not None:
            self.asked.main_grad = self.asked = None
