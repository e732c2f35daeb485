"""Residual gradients added in the norms' backward, with fakes of TE's layer and extension."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from fp8_suite.core.errors import UserError
from fp8_suite.te_models.kernels import fused_residual
from fp8_suite.te_models.kernels.fused_residual import enabled, fuse_residual_gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 16


def rmsnorm_bwd(gradient, x, scale, weight, sm_margin, zero_centered):
    g, x_hat = gradient * weight, x * scale[:, None]
    return (g - x_hat * (g * x_hat).mean(-1, keepdim=True)) * scale[:, None], (gradient * x_hat).sum(0)


@pytest.fixture(autouse=True)
def tex(monkeypatch):
    """Fake transformer_engine_torch; `sums` counts the calls of its fused kernel."""

    def rmsnorm_bwd_add(gradient, x, added, *args):
        tex.sums += 1
        dx, dw = rmsnorm_bwd(gradient, x, *args)
        return dx + added, dw

    tex = SimpleNamespace(rmsnorm_bwd=rmsnorm_bwd, rmsnorm_bwd_add=rmsnorm_bwd_add, sums=0)
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", tex)
    return tex


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        flat = x.view(-1, WIDTH)
        scale = flat.square().mean(-1).add(1e-5).rsqrt()
        ctx.save_for_backward(flat, scale, weight)
        return (flat * scale[:, None] * weight).view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        backward = sys.modules["transformer_engine_torch"].rmsnorm_bwd
        dx, dw = backward(gradient.reshape(-1, WIDTH), *ctx.saved_tensors, 0, False)
        return dx.view_as(gradient), dw


class Layer(nn.Module):
    """Fake te.TransformerLayer with a norm inside the attention branch, as in Qwen3."""

    def __init__(self):
        super().__init__()
        self.norms = nn.Parameter(torch.rand(3, WIDTH, dtype=torch.float64) + 0.5)
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
        self.unfused = 0

    def _bias_dropout_add(self, branch, bias, residual, drop_path=None):
        self.unfused += 1
        return residual + branch

    def forward(self, x):
        attended = Norm.apply(self.first(Norm.apply(x, self.norms[0])), self.norms[2])
        h = self._bias_dropout_add(attended.tanh(), None, x)
        return self._bias_dropout_add(self.second(Norm.apply(h, self.norms[1])).tanh(), None, h)


def gradients(layers, x, run):
    x = x.clone().requires_grad_()
    y = x * 2.0
    for layer in layers:
        y = run(layer, y)
    loss = Norm.apply(y, torch.ones(WIDTH, dtype=torch.float64)).square().sum()
    loss.backward()
    found = [loss.detach(), x.grad, *(p.grad for layer in layers for p in layer.parameters())]
    nn.ModuleList(layers).zero_grad()
    return found


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["stored", "recomputed", "reentrant"])
def test_gradients_match_unfused_sums(reentrant, tex):
    def run(layer, x):
        return layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)

    torch.manual_seed(0)
    layers, x = [Layer() for _ in range(3)], torch.randn(2, 5, WIDTH, dtype=torch.float64)
    names, expected = list(layers[0].state_dict()), gradients(layers, x, run)
    for layer in layers:
        fuse_residual_gradients(layer)
    assert tex.sums == 0 and list(layers[0].state_dict()) == names
    with enabled():
        for _ in range(2):
            torch.testing.assert_close(gradients(layers, x, run), expected)
    assert tex.sums == 2 * 2 * len(layers)


@pytest.mark.parametrize("other", ["bias", "drop_path", "frozen"])
def test_other_residual_additions_are_left_to_te(other):
    layer = Layer()
    fuse_residual_gradients(layer)
    residual, branch = (torch.randn(4, WIDTH, requires_grad=True) for _ in range(2))
    residual = residual.detach() if other == "frozen" else residual
    bias = torch.ones(1) if other == "bias" else None
    drop_path = nn.Identity() if other == "drop_path" else None
    layer._bias_dropout_add(branch, bias, residual, drop_path)
    assert layer.unfused == 1


@pytest.mark.parametrize("switch", [enabled, nullcontext], ids=["no-norm", "not-enabled"])
def test_a_gradient_that_no_norm_adds_raises(switch):
    layer = Layer()
    fuse_residual_gradients(layer)
    residual, branch = (torch.randn(4, WIDTH, requires_grad=True) for _ in range(2))
    with switch(), pytest.raises(UserError, match=r"reached no norm.*; add --no_fused_residuals"):
        layer._bias_dropout_add(branch, None, residual).sum().backward()
    assert not fused_residual._pending
