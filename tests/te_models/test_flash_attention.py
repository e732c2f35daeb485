"""Self-test of FlashAttention 4, on a stand-in for its package; the kernels themselves run in tests/gpu."""

import types

import pytest
import torch
import torch.nn.functional as F

from te_models import packed_attention
from te_models.kernels import flash_attention


@pytest.fixture
def interface(monkeypatch):
    """Stand-in for FlashAttention 4; `spoil` changes its results, `calls` records its arguments."""
    module = types.ModuleType(flash_attention.MODULE)
    module.calls, module.spoil = [], lambda out: out

    def attend(q, k, v, causal):
        heads = [t.float().transpose(1, 2) for t in (q, k, v)]
        out = F.scaled_dot_product_attention(*heads, is_causal=causal, enable_gqa=True).transpose(1, 2)
        return module.spoil(out.to(q.dtype)), None

    def flash_attn_func(q, k, v, *, causal, window_size, deterministic):
        module.calls.append(("rows", causal, window_size, deterministic))
        return attend(q, k, v, causal)

    def flash_attn_varlen_func(
        q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window_size, deterministic
    ):
        module.calls.append(("packed", causal, window_size, deterministic))
        assert cu_seqlens_q.tolist() == cu_seqlens_k.tolist() == [0, max_seqlen_q, 2 * max_seqlen_k]
        return attend(*(t.unflatten(0, (2, -1)) for t in (q, k, v)), causal)[0].flatten(0, 1)

    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    monkeypatch.setattr(flash_attention, "interface", lambda: module)
    monkeypatch.setattr(flash_attention, "installed", lambda: "4.0.0b99")
    return module


def self_test(**form) -> str | None:
    attend = flash_attention.as_te_calls(**{"packed": True} | form)
    return flash_attention.self_test(attend, 4, 2, 16, device="cpu")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("packed", "form"), [(True, "packed"), (False, "rows")])
def test_right_attention_passes_called_as_te_does(interface, packed, form, deterministic):
    assert self_test(packed=packed, deterministic=deterministic) is None
    assert interface.calls == [(form, True, (-1, 0), deterministic)]


def test_packed_attention_passes():
    assert flash_attention.self_test(packed_attention.attend_packed, 4, 2, 16, device="cpu") is None


def one_head_off(out):
    return torch.cat([out[..., :3, :], out[..., 3:, :] * 1.1], dim=-2)


def wrong_gradient(out):
    return out.detach() + 0.5 * (out - out.detach())


def gradient_not_a_number(out):
    if out.requires_grad:
        out.register_hook(lambda grad: grad * float("nan"))
    return out


@pytest.mark.parametrize(
    "spoil",
    [lambda out: 0 * out, one_head_off, wrong_gradient, gradient_not_a_number],
    ids=lambda f: f.__name__,
)
def test_wrong_attention_fails(interface, spoil):
    interface.spoil = spoil
    assert "4.0.0b99 computes wrong attention" in self_test() and flash_attention.INSTALL in self_test()


def test_an_error_is_reported_with_its_reason(interface):
    def spoil(out):
        raise RuntimeError("no such kernel\nand more")

    interface.spoil = spoil
    assert "fails (no such kernel)" in self_test() and "remove its compiled kernels in" in self_test()


def test_a_package_that_does_not_import_fails_the_self_test(monkeypatch):
    for name in ("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"):
        monkeypatch.setenv(name, "0")  # restored afterwards
    monkeypatch.setattr(flash_attention, "MODULE", "no_such_package")
    assert "fails (No module named 'no_such_package')" in self_test()


def test_it_applies_to_supported_heads_on_hopper_where_it_is_installed(monkeypatch):
    assert "Hopper" in flash_attention.why_not(128)  # no GPU here
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert "Hopper" in flash_attention.why_not(128)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert "not installed: pip install" in flash_attention.why_not(128)
    monkeypatch.setattr(flash_attention, "installed", lambda: "4.0.0b29")
    assert "head size 100" in flash_attention.why_not(100) and "head size 264" in flash_attention.why_not(264)
    assert flash_attention.why_not(128) is None
