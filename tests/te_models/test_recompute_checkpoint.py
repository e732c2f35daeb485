"""Checkpointing of TE's layers, on a module that keeps delayed scaling's state as TE does."""

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from fp8_suite.te_models.recompute.checkpoint import checkpoint_te
from torch import nn


class Manager:
    """TE's state of autocast regions, as far as recomputation uses it."""

    quantization_state = SimpleNamespace(autocast_depth=0)
    region = "none"

    @classmethod
    def get_autocast_state(cls):
        return cls.region

    @classmethod
    def set_autocast_state(cls, region):
        cls.region = region


@pytest.fixture(autouse=True)
def te(monkeypatch):
    monkeypatch.setitem(
        sys.modules, "transformer_engine.pytorch.quantization", SimpleNamespace(FP8GlobalStateManager=Manager)
    )


class Scaled(nn.Module):
    """Multiplies by a weight and its scale, and records the largest input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))
        state = SimpleNamespace(scale=torch.ones(1), amax_history=torch.zeros(4, 1))
        self.fp8_meta, self.seen = {"scaling_fwd": state}, []

    def forward(self, x):
        state = self.fp8_meta["scaling_fwd"]
        self.seen.append((state.scale.item(), Manager.region, Manager.quantization_state.autocast_depth))
        state.amax_history[0] = torch.maximum(state.amax_history[0], x.detach().abs().max())
        return (x * self.weight).square() * state.scale.clone()


@contextmanager
def autocast():
    Manager.region, Manager.quantization_state.autocast_depth = "fp8", 1
    yield
    Manager.region, Manager.quantization_state.autocast_depth = "none", 0


def test_backward_runs_the_layers_again_with_the_scales_and_the_region_of_the_first_pass():
    layers, x = [Scaled(), Scaled()], torch.tensor([1.0, -2.0], requires_grad=True)
    with autocast():
        hidden = x
        for layer in layers:
            hidden = checkpoint_te(layer, layer, hidden)
    states = [layer.fp8_meta["scaling_fwd"] for layer in layers]
    for state in states:  # as TE updates them at the end of the region
        state.scale.fill_(7.0)
        state.amax_history[0] = 0.5
    hidden.sum().backward()

    again = torch.tensor([1.0, -2.0], requires_grad=True)
    weights = [layer.weight.detach().clone().requires_grad_() for layer in layers]
    ((again * weights[0]).square() * weights[1]).square().sum().backward()
    assert torch.equal(x.grad, again.grad)
    assert all(
        torch.equal(layer.weight.grad, weight.grad) for layer, weight in zip(layers, weights, strict=True)
    )
    assert all(layer.seen == [(1.0, "fp8", 1)] * 2 for layer in layers)
    assert (Manager.region, Manager.quantization_state.autocast_depth) == ("none", 0)
    assert all(state.scale == 7.0 and state.amax_history[0] == 0.5 for state in states)
