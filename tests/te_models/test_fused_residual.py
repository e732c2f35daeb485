"""Residual gradients added in the norms' backward, on stand-ins for TE's layer and extension."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from core.errors import UserError
from te_models.kernels import fused_residual
from te_models.kernels.fused_residual import enabled, fuse_residual_gradients

WIDTH = 16


class Extension(SimpleNamespace):
    """Stand-in for transformer_engine_torch; `sums` counts the calls of its second function."""

    def __init__(self):
        super().__init__(rmsnorm_bwd=self.plain, rmsnorm_bwd_add=self.with_sum, sums=0)

    @staticmethod
    def plain(gradient, x, scale, weight, sm_margin, zero_centered):
        g = gradient * weight
        x_hat = x * scale[:, None]
        return (g - x_hat * (g * x_hat).mean(-1, keepdim=True)) * scale[:, None], (gradient * x_hat).sum(0)

    def with_sum(self, gradient, x, added, *rest):
        self.sums += 1
        dx, dw = self.plain(gradient, x, *rest)
        return dx + added, dw


@pytest.fixture
def tex(monkeypatch):
    stand_in = Extension()
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", stand_in)
    yield stand_in
    fused_residual._pending.clear()


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        flat = x.view(-1, WIDTH)
        scale = flat.square().mean(-1).add(1e-5).rsqrt()
        ctx.save_for_backward(flat, scale, weight)
        return (flat * scale[:, None] * weight).view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        flat, scale, weight = ctx.saved_tensors
        of_x, of_weight = sys.modules["transformer_engine_torch"].rmsnorm_bwd(
            gradient.reshape(-1, WIDTH), flat, scale, weight, 0, False
        )
        return of_x.view_as(gradient), of_weight


class Layer(nn.Module):
    """Stand-in for te.TransformerLayer; `inner_norm` adds a norm inside the attention branch, as in Qwen3."""

    def __init__(self, inner_norm: bool = False):
        super().__init__()
        self.norms = nn.Parameter(torch.rand(3, WIDTH, dtype=torch.float64) + 0.5)
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
        self.inner_norm = inner_norm

    def _bias_dropout_add(self, branch, bias, residual, drop_path=None):
        return residual + branch

    def forward(self, x):
        attended = self.first(Norm.apply(x, self.norms[0]))
        if self.inner_norm:
            attended = Norm.apply(attended, self.norms[2])
        h = self._bias_dropout_add(attended.tanh(), None, x)
        return self._bias_dropout_add(self.second(Norm.apply(h, self.norms[1])).tanh(), None, h)


def gradients(layers, x, run=lambda layer, x: layer(x)):
    x = x.clone().requires_grad_()
    y = x * 2.0
    for layer in layers:
        y = run(layer, y)
    Norm.apply(y, torch.ones(WIDTH, dtype=torch.float64)).square().sum().backward()
    found = [x.grad, *(p.grad for layer in layers for p in layer.parameters())]
    nn.ModuleList(layers).zero_grad()
    return found


RUNS = {
    "plain": lambda layer, x: layer(x),
    "recomputed": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "recomputed, reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
}


@pytest.mark.parametrize("inner_norm", [False, True])
@pytest.mark.parametrize("run", RUNS)
def test_gradients_are_those_of_separate_sums(run, inner_norm, tex):
    torch.manual_seed(0)
    layers, x = [Layer(inner_norm) for _ in range(3)], torch.randn(2, 5, WIDTH, dtype=torch.float64)
    expected = gradients(layers, x, RUNS[run])
    assert tex.sums == 0
    for layer in layers:
        fuse_residual_gradients(layer)
    with enabled():
        for _ in range(2):
            for found, wanted in zip(gradients(layers, x, RUNS[run]), expected, strict=True):
                torch.testing.assert_close(found, wanted)
    assert tex.sums == 2 * 2 * len(layers)


def test_layers_keep_their_parameters_and_values(tex):
    layer, x = Layer(), torch.randn(4, WIDTH, dtype=torch.float64)
    names, y = list(layer.state_dict()), layer(x)
    fuse_residual_gradients(layer)
    assert list(layer.state_dict()) == names and torch.equal(layer(x), y)
    with torch.no_grad():
        assert torch.equal(layer(x), y)


@pytest.mark.parametrize(
    "other", [{"bias": torch.ones(1)}, {"drop_path": nn.Identity()}, {"frozen": True}], ids=str
)
def test_more_than_a_sum_is_left_to_te(other, tex):
    layer, unfused = Layer(), []
    layer._bias_dropout_add = lambda *args: unfused.append(args)
    fuse_residual_gradients(layer)
    residual, branch = (torch.randn(4, WIDTH, requires_grad=True) for _ in range(2))
    if other.pop("frozen", False):
        residual = residual.detach()
    layer._bias_dropout_add(branch, other.get("bias"), residual, other.get("drop_path"))
    assert unfused


@pytest.mark.parametrize("switch", [enabled, nullcontext], ids=["no-norm", "not-enabled"])
def test_a_gradient_that_no_norm_adds_is_an_error(switch, tex):
    layer = Layer()
    fuse_residual_gradients(layer)
    residual, branch = (torch.randn(4, WIDTH, requires_grad=True) for _ in range(2))
    with switch(), pytest.raises(UserError, match="reached no norm; add --no_fused_residuals"):
        layer._bias_dropout_add(branch, None, residual).sum().backward()
    assert not fused_residual._pending
