"""Self-test of FlashAttention 4 with a fake package; tests/gpu runs the real kernels."""

import functools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fp8_suite.te_models.kernels import flash_attention, packed_attention


@pytest.fixture
def interface(monkeypatch):
    """Fake FlashAttention 4; `spoil` changes its results, `calls` records its arguments."""

    def attend(form, q, k, v, **settings):
        stand_in.calls.append((form, settings))
        rows = [t.float().unflatten(0, (2, -1)) if form == "packed" else t.float() for t in (q, k, v)]
        heads = (t.transpose(1, 2) for t in rows)  # [2, H or G, S, K]
        out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)
        out = stand_in.spoil(out.to(q.dtype))
        return out.flatten(0, 1) if form == "packed" else (out, None)

    stand_in = SimpleNamespace(calls=[], spoil=lambda out: out)
    stand_in.flash_attn_func = functools.partial(attend, "rows")
    stand_in.flash_attn_varlen_func = functools.partial(attend, "packed")
    monkeypatch.setattr(flash_attention, "interface", lambda: stand_in)
    monkeypatch.setattr(flash_attention, "installed", lambda: "4.0.0b99")
    return stand_in


def self_test(**form) -> str | None:
    attend = flash_attention.as_te_calls(**{"packed": True} | form)
    return flash_attention.self_test(attend, 4, 2, 16, device="cpu")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("packed", [True, False])
def test_correct_attention_passes_with_tes_arguments(interface, packed, deterministic):
    assert self_test(packed=packed, deterministic=deterministic) is None
    ((form, settings),) = interface.calls
    lengths = {name: settings.pop(name) for name in list(settings) if "seqlen" in name}
    assert settings == {"causal": True, "window_size": (-1, 0), "deterministic": deterministic}
    assert form == ("packed" if packed else "rows") and len(lengths) == (4 if packed else 0)
    assert not packed or lengths["cu_seqlens_k"].tolist() == [0, 160, 320]


def test_packed_attention_passes():
    attend = lambda *inputs: packed_attention.packed_attention(*inputs, 0.25, False)[0]  # noqa: E731
    assert flash_attention.self_test(attend, 4, 2, 16, device="cpu") is None


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
    assert "fails (no such kernel)" in self_test() and "delete its compiled kernels in" in self_test()


def test_a_package_that_does_not_import_fails_the_self_test(monkeypatch):
    for name in ("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"):
        monkeypatch.setenv(name, "0")  # monkeypatch restores it
    monkeypatch.setattr(flash_attention, "MODULE", "no_such_package")
    assert "fails (No module named 'no_such_package')" in self_test()


def test_it_requires_hopper_the_package_and_a_supported_head_size(monkeypatch):
    assert "Hopper" in flash_attention.why_not(128)  # no GPU here
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert "Hopper" in flash_attention.why_not(128)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert "not installed: pip install" in flash_attention.why_not(128)
    monkeypatch.setattr(flash_attention, "installed", lambda: "4.0.0b29")
    assert "head size 100" in flash_attention.why_not(100) and "head size 264" in flash_attention.why_not(264)
    assert flash_attention.why_not(128) is None
