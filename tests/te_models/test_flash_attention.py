"""Self-test of FlashAttention 4 on other attention; tests/gpu runs the real kernels."""

import pytest
import torch
from fp8_suite.te_models.kernels import flash_attention, packed_attention


def self_test(spoil=lambda out: out) -> str | None:
    """Test the reference of packed attention, with results that `spoil` changes."""

    def attend(q, k, v, cu_seqlens, longest):
        return spoil(packed_attention.packed_attention(q, k, v, cu_seqlens, longest, 0.25, False)[0])

    return flash_attention.self_test(attend, 4, 2, 16, device="cpu")


def one_head_off(out):
    return torch.cat([out[..., :3, :], out[..., 3:, :] * 1.1], dim=-2)


def wrong_gradient(out):
    return out.detach() + 0.5 * (out - out.detach())


def gradient_not_a_number(out):
    if out.requires_grad:
        out.register_hook(lambda grad: grad * float("nan"))
    return out


def zeros(out):
    return 0 * out


def zeros_without_gradients(out):
    return out if out.requires_grad else 0 * out


def error(out):
    raise RuntimeError("no such kernel\nand more")


WRONG = [zeros, zeros_without_gradients, one_head_off, wrong_gradient, gradient_not_a_number]


@pytest.mark.parametrize("spoil", [*WRONG, error])
def test_only_correct_attention_passes(spoil):
    assert self_test() is None
    problem = "fails (no such kernel)" if spoil is error else "computes wrong attention"
    assert problem in self_test(spoil)
