"""LoRA (arXiv:2106.09685): frozen linear layers y = x W^T become x W^T + alpha / rank * (x A^T) B^T.

An adapter is a pair of parameters, `lora_a` [rank, in] and `lora_b` [out, rank]. A linear layer of a Hugging
Face model holds its own. TE's modules compute several of Hugging Face's linear layers at once; they hold a
module `q_proj`, `gate_proj`, ... for each, so that every adapter is one of peft's: `hf_adapters`.

A layer keeps its class's GEMMs, FP8 casts and names of weights: `adapt_te` and `adapt_hf` only exchange its
class for a subclass that adds the adapters' product to the output. It needs the GEMM's input, so norms and
the MLP's GEMMs are not fused: norm and SwiGLU write BF16, which the GEMM casts to FP8 (`inputs`). Adapters
run in BF16.

T tokens, D input features, E output features, r rank, R rank times adapters of a GEMM, F feed-forward size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from fp8_suite.te_models.emulation.layers import activation_dtype
from fp8_suite.te_models.lora.inputs import Kernels, Norm, Plain, SwiGLU, is_native, kernels_of
from fp8_suite.te_models.lora.settings import LoraConfig
from torch import Tensor, nn

NAMES = A, B = "lora_a", "lora_b"


def is_adapter(name: str) -> bool:
    """True for the full name of an adapter's parameter."""
    return name.rpartition(".")[2] in NAMES


def freeze_base(model: nn.Module) -> None:
    """Let adapters train, and nothing else."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def hf_adapters(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with `lora_a` and `lora_b` by the Hugging Face name of their linear layer.

    Names are such as `model.layers.0.self_attn.q_proj`, in the order of the Hugging Face model's modules.
    """
    return {module.hf_name: module for module in model.modules() if hasattr(module, "hf_name")}


def initial_values(model: nn.Module, seed: int) -> Iterator[tuple[nn.Module, dict[str, Tensor]]]:
    """Yield each module of `hf_adapters` with whole initial values on the CPU, as peft draws after this seed.

    peft draws the default values of two nn.Linear before it initializes A again, and sets B to zero.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in hf_adapters(model).values():
        a, b = (torch.empty(getattr(module, name).shape) for name in NAMES)
        for drawn in (a, b, a):
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
        yield module, {A: a, B: b.zero_()}


@functools.cache
def _with_mixin(mixin: type, kind: type) -> type:
    """Return one subclass for all modules of a kind, so that compiled layers share a graph."""
    return type(f"Lora{kind.__name__}", (mixin, kind), {})


def _register(module: nn.Module, rank: int, features: int, outputs: int, weight: Tensor) -> None:
    for name, shape in ((A, (rank, features)), (B, (outputs, rank))):
        module.register_parameter(name, nn.Parameter(weight.new_empty(shape)))


# Hugging Face layers


class _HFLinear:
    """Mixin of nn.Linear and of torchao's FP8 layers."""

    lora: LoraConfig

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        inner = F.linear(F.dropout(x, self.lora.lora_dropout, self.training), self.lora_a).flatten(0, -2)
        rows = torch.addmm(out.flatten(0, -2), inner, self.lora_b.t(), alpha=self.lora.scaling)
        return rows.view_as(out)


def adapt_hf(model: nn.Module, lora: LoraConfig) -> None:
    """Add adapters to linear layers of an HFCausalLM, and freeze the rest. UserError if none matches.

    Call after layers are converted to FP8 and before sharding.
    """
    inside = {id(module) for block in model.blocks for module in block.modules()}
    linears = {
        name.removeprefix("model."): module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) in inside
    }
    for name in lora.targets(list(linears)):
        linear = linears[name]
        _register(linear, lora.lora_rank, linear.in_features, linear.out_features, linear.weight)
        linear.__class__ = _with_mixin(_HFLinear, type(linear))
        linear.lora, linear.hf_name = lora, name
    freeze_base(model)


# TE layers


class _AddProduct(torch.autograd.Function):
    """out [T, E] + scaling * inner [T, R] @ b [E, R]^T; with `in_place` in the memory of `out`.

    TE's and the emulation's GEMMs do not save their output for backward.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, inner: Tensor, b: Tensor, scaling: float, in_place: bool) -> Tensor:
        ctx.save_for_backward(inner, b)
        ctx.scaling, total = scaling, out.detach() if in_place else out.clone()
        return total.addmm_(inner, b.t(), alpha=scaling)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inner, b = ctx.saved_tensors
        return grad, ctx.scaling * (grad @ b), ctx.scaling * (grad.t() @ inner), None, None


class _TEModule:
    """Mixin of te.Linear, native or emulated, whose input may pass through a norm first.

    `sizes` are the output features of each of Hugging Face's linear layers in its weight. `arrange` maps
    their rows [E, R], one layer after the other, to the order of the weight's rows.
    """

    lora: LoraConfig
    seed: int  # of the dropout mask, which recomputation draws again: `draw_dropout`
    in_place: bool  # the result of its GEMM is not kept for recomputation
    sizes: dict[str, int]
    arrange: Callable[[Tensor], Tensor]
    kernels: Kernels
    eps: float  # of the norm

    def forward(self, x: Tensor, *args: Any, inner: Tensor | None = None, **kwargs: Any) -> Any:
        """Run the layer; `inner` [..., R] is the product of x and all A, if it is known."""
        adapters = {name: getattr(self, name) for name in self.sizes if hasattr(self, name)}
        dropout, a, dtype = self.lora.lora_dropout * self.training, None, activation_dtype(x)
        if inner is None:
            a = torch.cat([module.lora_a for module in adapters.values()]).to(dtype)
        fused_a = None if dropout else a
        if hasattr(self, "layer_norm_weight"):
            weight = self.layer_norm_weight.to(dtype)
            x, inner = Norm.apply(x.to(dtype), weight, fused_a, self.eps, self.kernels)
        elif fused_a is not None:
            x, inner = Plain.apply(x, fused_a)
        out, rest = super().forward(x, *args, **kwargs), ()
        if isinstance(out, tuple):  # with a bias for the caller to add
            out, *rest = out
        scaling = self.lora.scaling
        if inner is None:
            generator = torch.Generator(x.device).manual_seed(self.seed)
            kept = torch.empty_like(x).bernoulli_(1 - dropout, generator=generator)
            inner, scaling = F.linear(x * kept, a), scaling / (1 - dropout)
        parts = [
            adapters[name].lora_b if name in adapters else x.new_zeros(size, 0)
            for name, size in self.sizes.items()
        ]
        b = self.arrange(torch.block_diag(*parts)).to(out.dtype)
        rows = out.flatten(0, -2), inner.flatten(0, -2)
        out = _AddProduct.apply(*rows, b, scaling, self.in_place).view_as(out)
        return (out, *rest) if rest else out


def draw_dropout(model: nn.Module) -> None:
    """Draw dropout for a forward pass from torch's CPU generator, whose state checkpoints save."""
    for module in model.modules():
        if isinstance(module, _TEModule):
            module.seed = int(torch.randint(2**48, ()))


class LayerNormMLP(nn.Module):
    """te.LayerNormMLP in two modules, whose inputs adapters can read."""

    def __init__(self, te: Any, hidden_size: int, ffn_hidden_size: int, *, eps: float, **factory_kwargs: Any):
        super().__init__()
        self.kernels, self.returns_bias = kernels_of(te), is_native(te)
        self.fc1 = te.LayerNormLinear(
            hidden_size, 2 * ffn_hidden_size, eps=eps, normalization="RMSNorm", bias=False, **factory_kwargs
        )
        self.fc2 = te.Linear(ffn_hidden_size, hidden_size, bias=False, **factory_kwargs)

    def forward(self, x: Tensor, **arguments: Any) -> Any:
        hidden, a = self.fc1(x, **arguments), None  # [..., 2F]
        if isinstance(self.fc2, _TEModule) and not (self.training and self.fc2.lora.lora_dropout):
            a = self.fc2.down_proj.lora_a.to(hidden.dtype)
        act, inner = SwiGLU.apply(hidden, a, self.kernels)
        out = self.fc2(act, **arguments) if inner is None else self.fc2(act, inner=inner, **arguments)
        return (out, None) if self.returns_bias else out


# Names of the parameters of `LayerNormMLP` -> those of te.LayerNormMLP, in a layer.
FUSED_NAMES = {
    "layernorm_mlp.fc1.layer_norm_weight": "layernorm_mlp.layer_norm_weight",
    "layernorm_mlp.fc1.weight": "layernorm_mlp.fc1_weight",
    "layernorm_mlp.fc2.weight": "layernorm_mlp.fc2_weight",
}


def base_parameters(layer: nn.Module) -> dict[str, nn.Parameter]:
    """Return a TE layer's parameters without adapters, by their names in a te.TransformerLayer."""
    named = layer.named_parameters()
    return {FUSED_NAMES.get(name, name): parameter for name, parameter in named if not is_adapter(name)}


def adapt_te(
    layer: nn.Module,
    path: str,
    sizes: dict[str, int],
    targets: dict[str, str],
    lora: LoraConfig,
    *,
    te: Any,
    in_place: bool,
    arrange: Callable[[Tensor], Tensor],
) -> None:
    """Add adapters to the Linear or LayerNormLinear `path` of a layer of `te`; see `_TEModule`.

    `targets` are the Hugging Face names of a layer's adapted linear layers by their last part.
    """
    module = layer.get_submodule(path)
    if hasattr(module, "layer_norm_weight"):
        module = _without_fused_norm(module, te)
        layer.set_submodule(path, module)
    for name in (name for name in sizes if name in targets):
        adapter = nn.Module()
        _register(adapter, lora.lora_rank, module.weight.shape[1], sizes[name], module.weight)
        adapter.hf_name = targets[name]
        module.add_module(name, adapter)
    module.__class__ = _with_mixin(_TEModule, type(module))
    module.lora, module.sizes, module.in_place, module.arrange = lora, sizes, in_place, arrange
    module.kernels = kernels_of(te)


def _without_fused_norm(module: nn.Module, te: Any) -> nn.Module:
    """Return a te.Linear on the meta device with the parameters of a te.LayerNormLinear."""
    weight, bias = module.weight, getattr(module, "bias", None)
    linear = te.Linear(
        weight.shape[1],
        weight.shape[0],
        bias=bias is not None and bias.numel() > 0,
        params_dtype=weight.dtype,
        device="meta",
    )
    linear.layer_norm_weight, linear.eps = module.layer_norm_weight, module.eps
    return linear
