"""SwiGLU fused with FP8 casts, against TE's kernels."""

import importlib

import pytest
import torch
from fp8_suite.te_models.kernels import fused_swiglu
from fp8_suite.te_models.kernels.fused_swiglu import difference, swiglu, swiglu_backward

from tests.gpu.models import DEVICE, batch, build, spec
from tests.gpu.test_te_model import bf16, fp8, step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_hopper")]
PASSES = 6  # enough for delayed scaling to adapt the scales of gradients


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
def test_forward_and_backward_match_te(shape, scale, usage):
    extension = importlib.import_module("transformer_engine_torch")
    tokens, features = shape
    torch.manual_seed(0)
    x = (2 * torch.randn(tokens, 2 * features, device=DEVICE)).bfloat16()
    grad = torch.randn(tokens, features, device=DEVICE).bfloat16()
    flags = dict(zip(("rowwise", "columnwise"), usage, strict=True))
    fused, separate = (quantizer("e4m3", scale, **flags) for _ in range(2))
    assert (
        difference(swiglu(extension.swiglu, x, fused), extension.swiglu(x, separate), fused, separate) is None
    )
    fused, separate = (quantizer("e5m2", scale, **flags) for _ in range(2))
    bias, actual = swiglu_backward(extension.dswiglu, grad, x, fused)
    assert bias is None
    assert difference(actual, separate(extension.dswiglu(grad, x, None)), fused, separate) is None


def test_nan_stays_nan():
    x = torch.zeros(64, 256, device=DEVICE, dtype=torch.bfloat16)
    x[3, 5], x[3, 133] = float("nan"), 1.0
    actual = swiglu(None, x, quantizer("e4m3", 1.0))
    for bits in (actual._data, actual._transpose.T):
        assert bits.view(torch.float8_e4m3fn).float().isnan().nonzero().tolist() == [[3, 5]]


def gradient_errors() -> dict[str, float]:
    """Relative error of a small model's gradients with delayed scaling against BF16, by parameter."""
    autocast = fp8("delayed")
    inputs = batch([[256]] * 8, packed=False)
    exact, reference = step(build(spec(), use_te=True, packed=False), inputs, bf16())
    model = build(spec(), use_te=True, packed=False)
    for _ in range(PASSES):
        loss, grads = step(model, inputs, autocast)
    assert loss == pytest.approx(exact, rel=1e-2)
    return {key: ((grads[key] - grad).norm() / grad.norm()).item() for key, grad in reference.items()}


def test_a_model_uses_the_kernels_with_gradients_as_accurate_as_tes(monkeypatch):
    """Gradients have the same error against BF16 as with TE's kernels.

    They are not compared with each other: attention's backward is not deterministic, and FP8 amplifies a
    difference in the last bit to a full FP8 step.
    """
    mlp = importlib.import_module("transformer_engine.pytorch.module.layernorm_mlp")
    original, run, calls = mlp._act_func, fused_swiglu._run, []
    monkeypatch.setattr(fused_swiglu, "_run", lambda *args: calls.append(args[0]) or run(*args))
    with fused_swiglu.enabled():
        fused = gradient_errors()
    assert mlp._act_func is original and len(calls) == PASSES * 2 * 4  # passes, forward and backward, layers
    unfused = gradient_errors()
    assert len(calls) == PASSES * 2 * 4
    for name, error in fused.items():
        assert error < 1.1 * unfused[name] + 0.01, (
            f"{name}: {error:.4f}, with TE's kernels {unfused[name]:.4f}"
        )


def test_the_self_test_fails_for_a_wrong_kernel(monkeypatch):
    assert fused_swiglu.self_test() is None
    run = fused_swiglu._run

    def mixed_up(*args):
        out = run(*args)
        out._transpose[1] = 0
        return out

    monkeypatch.setattr(fused_swiglu, "_run", mixed_up)
    assert fused_swiglu.self_test() == "the transpose differs from the reference"
