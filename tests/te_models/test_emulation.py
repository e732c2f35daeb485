"""The emulated TE layer: operands of each recipe's GEMMs, what fused casts read, packing, and whole runs.

`test_families` compares it with Hugging Face's layers in FP32 and BF16; here FP32 is the reference.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from fp8_suite.te_models import emulation as te
from fp8_suite.te_models.emulation.casts import E4M3, E5M2, cast_blocks, cast_mx, cast_tensor, cast_with_scale

from tests.te_models.test_emulated_scaling import HIDDEN, RECIPES, layer, rope

QK_NORM = {"qk_norm_type": "RMSNorm", "qk_norm_eps": 1e-6, "qk_norm_before_rope": True}


def emulated(attention: str = "bshd", **options) -> te.TransformerLayer:
    """Build a float32 layer whose norms are far from ones."""
    module = layer(attention, params_dtype=torch.float32, **options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.15, generator=generator).add_(1.0 if parameter.ndim == 1 else 0.0)
    return module


def batch(rows: int = 4, length: int = 32) -> torch.Tensor:
    return torch.randn(rows, length, HIDDEN, generator=torch.Generator().manual_seed(7))


def gradients(module, x, recipe: str | None, **call) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Output, and gradients of a fixed linear function of it; backward runs outside the contexts.

    In a recipe BF16 autocast is on, and delayed scaling's result follows a step that calibrates it.
    """
    chosen = RECIPES.get(recipe)
    for _ in range(2 if recipe == "delayed" else 1):
        x = x.detach().clone().requires_grad_()
        module.zero_grad()
        autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=recipe is not None)
        with autocast, te.autocast(enabled=chosen is not None, recipe=chosen):
            y = module(x, rotary_pos_emb=rope(), **call)
        y.backward(torch.randn(y.numel(), generator=torch.Generator().manual_seed(8)).view_as(y).to(y.dtype))
    return y.detach(), {"input": x.grad} | {name: p.grad.clone() for name, p in module.named_parameters()}


def error(result: torch.Tensor, reference: torch.Tensor) -> float:
    return ((result.float() - reference.float()).norm() / reference.float().norm()).item()


@pytest.mark.parametrize("options", [{}, QK_NORM], ids=["llama", "qwen3"])
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_near_fp32(name, options):
    """Rounding errors are 2^-9 in BF16, 2^-4 in E4M3 and 2^-3 in E5M2; those of four GEMMs add up."""
    y, grads = gradients(emulated(**options), batch(), None)
    rounded_y, rounded_grads = gradients(emulated(**options), batch(), name)
    assert rounded_y.dtype == torch.bfloat16
    assert rounded_grads["layernorm_mlp.fc1_weight"].dtype == torch.float32
    least, most, most_of_gradients = (0.001, 0.015, 0.02) if name == "bf16" else (0.03, 0.12, 0.2)
    assert least < error(rounded_y, y) < most
    for key, grad in grads.items():
        assert least < error(rounded_grads[key], grad) < most_of_gradients, key


def blocks(*shape: int, power_of_two: bool = True):
    return lambda x: cast_blocks(x, E4M3, shape, power_of_two=power_of_two)


def block_operands(**scales) -> dict:
    row, column, square = (blocks(*shape, **scales) for shape in ((1, 128), (128, 1), (128, 128)))
    return {"input": (row, column), "weight": (square, square), "grad": (row, column)}


FORMATS = {"input": E4M3, "weight": E4M3, "grad": E5M2}
# Casts by recipe and kind, for GEMMs that contract features and for GEMMs that contract tokens.
OPERANDS = {
    "current": {kind: (partial(cast_tensor, dtype=dtype),) * 2 for kind, dtype in FORMATS.items()},
    "block": block_operands(),
    "block_fp32": block_operands(power_of_two=False),
    "mxfp8": {kind: tuple(partial(cast_mx, dtype=E4M3, dim=dim) for dim in (1, 0)) for kind in FORMATS},
}


def operand(name: str, kind: str, x: torch.Tensor, *, across: bool) -> torch.Tensor:
    """Return a float64 operand, rounded to BF16 before FP8; `across`: its GEMM contracts dimension 0."""
    return OPERANDS[name][kind][across](x.detach().bfloat16()).dequantize().double()


def uneven(rows: int, columns: int) -> torch.Tensor:
    """Random values whose magnitudes differ by powers of two along both dimensions, so scales differ."""
    powers = torch.randint(-8, 9, (rows, 1)) + torch.randint(-8, 9, (columns,))
    return torch.randn(rows, columns) * 2.0**powers


def assert_rounded(result: torch.Tensor, exact: torch.Tensor) -> None:
    """Check that `result` is `exact` rounded to BF16, up to the order of float32 sums."""
    torch.testing.assert_close(result.double(), exact, rtol=2**-8, atol=1e-6 * exact.abs().max().item())
    assert (result.double() == exact.bfloat16().double()).double().mean() > 0.99


@pytest.mark.parametrize("name", OPERANDS)
def test_gemms_read_the_operands_of_their_recipe(name):
    torch.manual_seed(5)
    module = te.Linear(256, 384, bias=True, params_dtype=torch.float32)
    x, grad = uneven(256, 256).bfloat16().requires_grad_(), uneven(256, 384).bfloat16()
    with torch.no_grad():
        module.weight.copy_(uneven(384, 256))
        module.bias.normal_(std=100.0)
    with torch.autocast("cpu", dtype=torch.bfloat16), te.autocast(enabled=True, recipe=RECIPES[name]):
        y = module(x)
    y.backward(grad)
    along, across = (partial(operand, name, across=side) for side in (False, True))
    bias = module.bias.detach().bfloat16().double()  # biases stay in high precision
    assert_rounded(y, along("input", x) @ along("weight", module.weight).T + bias)
    assert_rounded(x.grad, along("grad", grad) @ across("weight", module.weight))
    assert_rounded(module.weight.grad, across("grad", grad).T @ across("input", x))
    assert_rounded(module.bias.grad, grad.double().sum(0))


@pytest.mark.parametrize("name", [*OPERANDS, "delayed"])
def test_fused_casts_read_tes_precision(name):
    """Delayed scaling casts float32 results of norm and SwiGLU; current scaling uses SwiGLU's exact amax."""
    torch.manual_seed(6)
    mlp, fused = te.LayerNormMLP(256, 256, params_dtype=torch.bfloat16), name == "delayed"
    with torch.no_grad():
        mlp.layer_norm_weight.normal_(1.0, 0.5)
    x = torch.randn(128, 256).bfloat16()
    with torch.no_grad(), te.autocast(enabled=True, recipe=RECIPES[name]):
        y = mlp(x)

    def cast(kind, value, amax=None):
        if fused:
            return cast_with_scale(value, torch.tensor(1.0), E4M3).dequantize()
        if amax is not None and name == "current":
            return cast_tensor(value.bfloat16(), E4M3, amax=amax).dequantize()
        return operand(name, kind, value, across=False).float()

    gamma = mlp.layer_norm_weight.float()
    normed = x.float() * x.float().square().mean(-1, keepdim=True).add(1e-5).rsqrt() * gamma
    hidden = cast("input", normed) @ cast("weight", mlp.fc1_weight).T
    gate, up = hidden.bfloat16().float().chunk(2, dim=-1)
    act = F.silu(gate) * up
    exact = cast("input", act, act.abs().max()).double() @ cast("weight", mlp.fc2_weight).double().T
    assert (y.double() == exact.bfloat16().double()).double().mean() > 0.97


def test_unknown_arguments_of_tes_layer_are_refused():
    with pytest.raises(TypeError, match=r"attention_type='cross'.* is not emulated"):
        layer(attention_type="cross")
