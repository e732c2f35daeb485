"""Selection of the kernels of the FP8 exchange; tests/gpu tests their arithmetic."""

import sys
from types import SimpleNamespace

import pytest
import torch
from fp8_suite.training.parallel import gradient_exchange
from fp8_suite.training.parallel.gradient_exchange import decode_fp8, fused_fp8, pack_fp8, self_test, sum_fp8

REFERENCES = {"pack_fp8": pack_fp8, "sum_fp8": sum_fp8, "decode_fp8": decode_fp8}


@pytest.fixture
def kernels(monkeypatch):
    """The module of kernels, with their references instead, since a CPU has no Triton."""
    module = SimpleNamespace(**REFERENCES)
    monkeypatch.setitem(sys.modules, "fp8_suite.training.parallel.gradient_exchange_triton", module)
    return module


def test_kernels_run_only_while_they_are_enabled(kernels):
    kernels.sum_fp8 = lambda packed, out, *, mean: out.fill_(7 if mean else 0)
    packed, out = pack_fp8(torch.ones(2, 300)), torch.empty(300)
    for context, expected in ((fused_fp8(), 7), (torch.no_grad(), 1)):
        with context:
            gradient_exchange.sum_fp8(packed, out, mean=True)
        assert out.eq(expected).all()


@pytest.mark.parametrize("name", REFERENCES)
def test_the_self_test_finds_a_wrong_kernel(kernels, name):
    assert self_test("cpu") is None

    def wrong_in_one_value(*tensors, **settings):
        result = REFERENCES[name](*tensors, **settings)
        (tensors[-1] if result is None else result)[..., 1500] = 1
        return result

    setattr(kernels, name, wrong_in_one_value)
    assert "differs from the reference" in self_test("cpu")
