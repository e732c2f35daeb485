"""BF16 products in FP32 on CPUs without BF16 instructions."""

import pytest
import torch
from fp8_suite.te_models.kernels import bf16_on_cpu
from torch.nn import functional as F


@pytest.fixture
def no_bf16_instructions(monkeypatch):
    monkeypatch.setattr(bf16_on_cpu, "has_bf16_instructions", lambda: False)


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attend_masked(q, k, v):
    mask = torch.zeros(q.shape[-2], k.shape[-2], dtype=q.dtype).masked_fill(torch.eye(6).bool(), -1.0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


PRODUCTS = {
    "matmul": (torch.matmul, [(5, 7), (7, 3)]),
    "batched": (torch.matmul, [(2, 5, 7), (2, 7, 3)]),
    "linear": (F.linear, [(2, 5, 7), (3, 7), (3,)]),
    "baddbmm": (torch.baddbmm, [(2, 5, 3), (2, 5, 7), (2, 7, 3)]),
    "attention": (attend, [(2, 4, 6, 8)] * 3),
    "masked attention": (attend_masked, [(2, 4, 6, 8)] * 3),
}


def results_and_gradients(product, operands):
    operands = [x.clone().requires_grad_() for x in operands]
    result = product(*operands)
    weights = torch.linspace(-1, 1, result.numel()).bfloat16().view_as(result).to(result.dtype)
    return [result.detach(), *torch.autograd.grad(result, operands, weights)]


@pytest.mark.parametrize("name", PRODUCTS)
def test_equals_the_fp32_product_of_bf16_operands(name, no_bf16_instructions):
    product, shapes = PRODUCTS[name]
    operands = [torch.randn(shape, generator=torch.manual_seed(7)).bfloat16() for shape in shapes]
    exact = results_and_gradients(product, [x.float() for x in operands])
    with bf16_on_cpu.fast_bf16():
        rounded = results_and_gradients(product, operands)
    assert {x.dtype for x in rounded} == {torch.bfloat16}
    tolerance = {"rtol": 2**-7, "atol": 2**-7} if "attention" in name else {"rtol": 2**-8, "atol": 1e-30}
    for result, expected in zip(rounded, exact, strict=True):
        torch.testing.assert_close(result.float(), expected, **tolerance)


def test_writes_into_out(no_bf16_instructions):
    a, b, out = torch.ones(2, 3).bfloat16(), torch.ones(3, 4).bfloat16(), torch.zeros(4, 4).bfloat16()
    with bf16_on_cpu.fast_bf16():
        torch.mm(a, b, out=out[1:3])
    assert out.sum(1).tolist() == [0, 12, 12, 0]
