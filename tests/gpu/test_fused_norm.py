"""RMSNorm fused with its cast against TE's own kernels."""

import importlib

import pytest
import torch

from te_models.kernels import fused_norm
from te_models.kernels.fp8_outputs import differs
from te_models.kernels.fused_norm import _Forward
from tests.gpu.models import DEVICE
from tests.gpu.test_fused_swiglu import check_in_a_model, quantizer

pytestmark = pytest.mark.gpu
WIDTH = 512  # of the small model


@pytest.fixture(autouse=True)
def tes_own_again(needs_hopper):
    yield
    fused_norm.use(False)


def settings() -> tuple:
    return importlib.import_module("transformer_engine_torch").DType.kBFloat16, 0, False


@pytest.mark.parametrize("usage", [(True, True), (True, False)], ids=["both", "rows"])
@pytest.mark.parametrize("shape", [(256, 512), (8192, 4096), (4096, 2048), (208, 3072), (48, 176), (40, 272)])
@pytest.mark.parametrize("scale", [1.0, 37.3, 3e4], ids=["small", "fits", "saturates"])
def test_it_is_tes(shape, scale, usage):
    extension = importlib.import_module("transformer_engine_torch")
    tokens, width = shape
    torch.manual_seed(0)
    x = (2 * torch.randn(tokens, width, device=DEVICE)).bfloat16()
    x[tokens // 2] = 0
    weight = (torch.rand(width, device=DEVICE) + 0.5).bfloat16()
    flags = dict(zip(("rowwise", "columnwise"), usage, strict=True))
    mine, theirs = (quantizer("e4m3", scale, **flags) for _ in range(2))
    found, mean, reciprocals = _Forward(None)(x, weight, 1e-5, None, mine, *settings())
    expected, _, same = extension.rmsnorm_fwd(x, weight, 1e-5, None, theirs, *settings())
    assert mean is None
    torch.testing.assert_close(reciprocals, same, rtol=1e-6, atol=0.0)
    assert differs(found, expected, mine, theirs) is None


def test_what_is_not_finite_stays_so():
    x = torch.ones(64, 256, device=DEVICE, dtype=torch.bfloat16)
    x[3, 5] = float("nan")
    found, _, reciprocals = _Forward(None)(x, x[0].clone(), 1e-5, None, quantizer("e4m3", 1.0), *settings())
    assert reciprocals.isnan().nonzero().tolist() == [[3]]
    for bits in (found._data, found._transpose.T):
        wrong = bits.view(torch.float8_e4m3fn).float().isnan()
        assert wrong[3].all() and not wrong[:3].any() and not wrong[4:].any()


def test_the_model_takes_it_and_computes_as_tes_does(monkeypatch):
    assert fused_norm.why_not(WIDTH) is None
    check_in_a_model(fused_norm, "cpp_extensions", "rmsnorm_fwd", monkeypatch)


@pytest.mark.parametrize("in_use", [False, True])
def test_a_kernel_that_computes_something_else_is_not_taken(in_use, monkeypatch):
    fused_norm.use(in_use)
    assert fused_norm.why_not(WIDTH) is None
    run = fused_norm._run

    def mixed_up(*given):
        out = run(*given)
        out[0]._transpose[1] = 0
        return out

    monkeypatch.setattr(fused_norm, "_run", mixed_up)
    assert fused_norm.why_not(WIDTH) == "it computes another transpose"

    def another_root(*given):
        out, mean, reciprocals = run(*given)
        return [out, mean, reciprocals + 1]

    monkeypatch.setattr(fused_norm, "_run", another_root)
    assert fused_norm.why_not(WIDTH) == "it computes another root of the mean square"
