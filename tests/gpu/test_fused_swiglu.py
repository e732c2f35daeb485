"""SwiGLU fused with its casts against TE's own kernels."""

import importlib

import pytest
import torch

from te_models.kernels import fused_swiglu
from te_models.kernels.fp8_outputs import differs
from te_models.kernels.fused_swiglu import _Backward, _Forward
from tests.gpu.models import DEVICE, batch, build, plan
from tests.gpu.test_te_model import bf16, fp8, step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_hopper")]
PASSES = 6  # delayed scaling has found the scales of gradients by then


def quantizer(dtype, scale, *, rowwise=True, columnwise=True):
    tensors = importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor")
    extension = importlib.import_module("transformer_engine_torch")
    one = {"device": DEVICE, "dtype": torch.float32}
    kind = {"e4m3": extension.DType.kFloat8E4M3, "e5m2": extension.DType.kFloat8E5M2}[dtype]
    made = tensors.Float8Quantizer(
        torch.full((1,), scale, **one), torch.zeros(1, **one), kind, rowwise=rowwise, columnwise=columnwise
    )
    made.internal = True
    return made


@pytest.mark.parametrize("usage", [(True, True), (True, False)], ids=["both", "rows"])
@pytest.mark.parametrize("shape", [(256, 512), (4096, 14336), (48, 176)])
@pytest.mark.parametrize("scale", [1.0, 37.3, 3e4], ids=["small", "fits", "saturates"])
def test_forward_and_backward_are_tes(shape, scale, usage):
    extension = importlib.import_module("transformer_engine_torch")
    tokens, features = shape
    torch.manual_seed(0)
    x = (2 * torch.randn(tokens, 2 * features, device=DEVICE)).bfloat16()
    grad = torch.randn(tokens, features, device=DEVICE).bfloat16()
    flags = dict(zip(("rowwise", "columnwise"), usage, strict=True))
    mine, theirs = (quantizer("e4m3", scale, **flags) for _ in range(2))
    assert differs(_Forward(extension.swiglu)(x, mine), extension.swiglu(x, theirs), mine, theirs) is None
    mine, theirs = (quantizer("e5m2", scale, **flags) for _ in range(2))
    bias, found = _Backward(extension.dswiglu)(grad, x, mine)
    assert bias is None
    assert differs(found, theirs(extension.dswiglu(grad, x, None)), mine, theirs) is None


def test_what_is_not_finite_stays_so():
    x = torch.zeros(64, 256, device=DEVICE, dtype=torch.bfloat16)
    x[3, 5], x[3, 133] = float("nan"), 1.0
    mine = quantizer("e4m3", 1.0)
    found = _Forward(None)(x, mine)
    for bits in (found._data, found._transpose.T):
        assert bits.view(torch.float8_e4m3fn).float().isnan().nonzero().tolist() == [[3, 5]]


def gradient_errors() -> dict[str, float]:
    """How far gradients of a small model under delayed scaling lie from BF16's, with the kernels in use."""
    _, autocast = fp8("delayed")
    inputs = batch([[256]] * 8, packed=False)
    exact, reference = step(build(plan(), use_te=True, packed=False), inputs, bf16())
    model = build(plan(), use_te=True, packed=False)
    for _ in range(PASSES):
        loss, grads = step(model, inputs, autocast)
    assert loss == pytest.approx(exact, rel=1e-2)
    return {key: ((grads[key] - grad).norm() / grad.norm()).item() for key, grad in reference.items()}


def compare(fused: dict[str, float], apart: dict[str, float]) -> None:
    """Gradients lie as far from BF16's as with TE's kernels.

    Not as near each other as that: attention's backward adds up in changing order, and a last bit is a step
    of FP8 further on.
    """
    for name, error in fused.items():
        assert error < 1.1 * apart[name] + 0.01, f"{name}: {error:.4f}, with TE's kernels {apart[name]:.4f}"


def check_in_a_model(kernels, owner: str, name: str, monkeypatch) -> None:
    """The model takes `kernels`, two a layer and pass, in place of `name` in TE's `owner`, and TE's again."""
    module = importlib.import_module(f"transformer_engine.pytorch.{owner}")
    calls = []
    run = kernels._run
    monkeypatch.setattr(kernels, "_run", lambda *args: calls.append(args[0]) or run(*args))
    kernels.use(True)
    fused = gradient_errors()
    assert getattr(module, name).original and len(calls) == PASSES * 2 * 4
    kernels.use(False)
    assert not hasattr(getattr(module, name), "original")
    compare(fused, gradient_errors())
    assert len(calls) == PASSES * 2 * 4


def test_the_model_takes_it_and_computes_as_tes_does(monkeypatch):
    assert fused_swiglu.why_not() is None
    check_in_a_model(fused_swiglu, "module.layernorm_mlp", "_act_func", monkeypatch)


def test_a_kernel_that_computes_something_else_is_not_taken(monkeypatch):
    assert fused_swiglu.why_not() is None
    run = fused_swiglu._run

    def mixed_up(kernel, read, shape, quantizer):
        out = run(kernel, read, shape, quantizer)
        out._transpose[1] = 0
        return out

    monkeypatch.setattr(fused_swiglu, "_run", mixed_up)
    assert fused_swiglu.why_not() == "it computes another transpose"
