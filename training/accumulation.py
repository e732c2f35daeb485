"""Sums of gradients over the micro-batches of a step, beside BF16 parameters that lie whole on one device.

Autograd adds in the parameter's own BF16, where the eighth micro-batch loses the bits that the first seven
have grown to. Here sums are `main_grad`, in FP32 unless told otherwise. Into those of TE's GEMM weights TE's
kernels add as they multiply, which saves a pass over memory; others are added as soon as autograd has them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

TE_WEIGHTS = ("weight", "fc1_weight", "fc2_weight")


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
        self.fused = [
            getattr(module, name)
            for module in model.modules()
            if getattr(module, "fuse_wgrad_accumulation", False)
            for name in TE_WEIGHTS
            if getattr(module, name, None) is not None and getattr(module, name).requires_grad
        ]
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

    def begin_micro_batch(self, *, first: bool) -> None:
        """To be called before the forward, in which TE notes what backward is to do with the sums."""
        for weight in self.fused:
            weight.overwrite_main_grad = first

    def clear(self) -> None:
        """Forget the step's sums; TE's are overwritten by the next one's."""
        for parameter in self.others:
            parameter.main_grad = None
