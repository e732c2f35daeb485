"""FlashAttention 4, if installed, against the attention of cuDNN and torch."""

import importlib
import json
import os
import subprocess
import sys

import pytest
import torch
from fp8_suite.te_models.kernels import flash_attention, flash_attention_cache, packed_attention
from fp8_suite.training import launch
from fp8_suite.training.config import parse_config

from tests.gpu.models import DEVICE
from tests.gpu.test_run import SMALL, losses, train

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def needs_flash_attention_4():
    if reason := flash_attention.why_not(64):
        pytest.skip(reason)


@pytest.mark.parametrize("layers", ["--use_te", ""], ids=["te", "hf"])
@pytest.mark.parametrize("packing", ["", "--no_packing"], ids=["packed", "padded"])
def test_a_run_with_flash_attention_4_has_the_same_losses(tmp_path, layers, packing):
    flags = SMALL.replace("--use_te", layers).replace("--deterministic", packing) + " --no_export"
    train(tmp_path / "flash", flags)
    train(tmp_path / "other", f"{flags} --no_flash_attention")
    environments = [json.loads((tmp_path / n / "env.json").read_text()) for n in ("flash", "other")]
    versions = [env["flash_attention"] for env in environments]
    assert versions == [flash_attention.installed(), None]
    if layers:
        assert [env["attention_backend"] for env in environments] == ["flash", "fused"]
    actual, expected = losses(tmp_path / "flash"), losses(tmp_path / "other")
    assert actual[1] == pytest.approx(expected[1], rel=1e-4)
    assert actual[12] == pytest.approx(expected[12], rel=2e-2)
    assert actual != expected  # equal losses would mean that the same kernels ran


def test_deterministic_runs_are_bit_for_bit_equal_and_use_fused_attention(tmp_path):
    flags = f"{SMALL} --mixed_precision fp8 --no_export"
    outputs = [train(tmp_path / name, flags) for name in ("one", "two")]
    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    assert not any("UNFUSED" in output for output in outputs)


@pytest.mark.parametrize("layers", ["--use_te", ""], ids=["te", "hf"])
def test_compiled_kernels_are_cached_on_disk(tmp_path, monkeypatch, layers):
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(tmp_path / "cache"))
    train(tmp_path / "run", SMALL.replace("--use_te", layers).replace("--deterministic", "") + " --no_export")
    assert list((tmp_path / "cache").rglob("*.o"))


@pytest.mark.parametrize("trained", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("packed", [True, False])
def test_kernels_compiled_without_a_gpu_are_those_of_a_run_and_compute_the_same_bits(
    tmp_path, packed, trained
):
    """The run loads every kernel from the cache and compiles none."""
    code = """
import sys, torch
from fp8_suite.te_models.kernels import flash_attention
torch.manual_seed(0)
q, k, v = (torch.randn(320, n, 64, device="cuda").bfloat16() for n in (8, 2, 2))
trained = sys.argv[3] == "True"
for t in (q, k, v):
    t.requires_grad_(trained)
cu_seqlens = torch.tensor([0, 160, 320], device="cuda").int()
attend = flash_attention.as_te_calls(packed=sys.argv[1] == "True")
out = attend(q, k, v, cu_seqlens, 160)
if trained:
    out.sum().backward()
torch.save([out, q.grad, k.grad, v.grad][: 4 if trained else 1], sys.argv[2])
"""
    results, names = [], []
    for ahead in (True, False):
        folder = tmp_path / str(ahead)
        environment = os.environ | {"FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(folder)}
        if ahead:
            arguments = json.dumps([8, 2, 64, packed, False, trained])
            command = [sys.executable, "-m", flash_attention_cache.COMPILER, arguments]
            subprocess.run(command, env=environment | flash_attention_cache.ON_CPU, check=True)
            compiled = sorted(path.name for path in folder.rglob("*.o"))
        command = [sys.executable, "-c", code, str(packed), str(tmp_path / "results"), str(trained)]
        subprocess.run(command, env=environment, check=True)
        names.append(sorted(path.name for path in folder.rglob("*.o")))
        results.append(torch.load(tmp_path / "results"))
    assert compiled == names[0] == names[1]
    assert torch.equal(results[0][0], results[1][0])
    for a, b in zip(*results, strict=True):  # gradients of queries are summed in any order
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("layers", ["--use_te", ""], ids=["te", "hf"])
def test_a_run_that_evaluates_needs_no_kernel_that_is_not_compiled_ahead(tmp_path, monkeypatch, layers):
    cache = tmp_path / "cache"
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache))
    flags = SMALL.replace("--use_te", layers).replace("--deterministic", "").split()
    cfg = parse_config([*flags, "--no_export"], prog="train_fp8.py", description="")
    for variant in launch.kernels_to_compile(cfg):
        command = [sys.executable, "-m", flash_attention_cache.COMPILER, json.dumps(variant)]
        subprocess.run(command, env=os.environ | flash_attention_cache.ON_CPU, check=True)
    assert not launch.kernels_to_compile(cfg)
    ahead = sorted(cache.rglob("*.o"))
    train(tmp_path / "run", " ".join([*flags, "--no_export --eval_at_start"]))
    assert ahead and sorted(cache.rglob("*.o")) == ahead


@pytest.mark.parametrize("heads", [(8, 2, 64), (8, 8, 128), (4, 1, 32)])
def test_packed_attention_matches_the_reference(heads):
    number, groups, size = heads
    lengths = [1, 300, 17, 128, 578]
    cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    torch.manual_seed(0)
    q = torch.randn(sum(lengths), number, size, device=DEVICE)
    k, v = (torch.randn(sum(lengths), groups, size, device=DEVICE) for _ in range(2))
    grad = torch.randn_like(q)

    def run(dtype, flash_4):
        inputs = [t.to(dtype, copy=True).requires_grad_() for t in (q, k, v)]
        out, _ = packed_attention.packed_attention(*inputs, cu_seqlens, max(lengths), size**-0.5, flash_4)
        out.backward(grad.to(dtype))
        return [out, *(t.grad for t in inputs)]

    expected = run(torch.float32, False)  # runs the float32 reference
    actual = run(torch.bfloat16, True)
    assert packed_attention.self_test(*heads) is None
    for a, b in zip(actual, expected, strict=True):
        assert (a.float() - b).norm() / b.norm() < 1e-2


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("heads", [(32, 8, 64), (8, 8, 128)])
def test_the_self_test_passes_the_installed_version_and_fails_a_broken_one(heads, packed, monkeypatch):
    module = importlib.import_module(flash_attention.MODULE)
    for deterministic in (False, True):
        attend = flash_attention.as_te_calls(packed=packed, deterministic=deterministic)
        assert flash_attention.self_test(attend, *heads) is None
    name = "flash_attn_varlen_func" if packed else "flash_attn_func"
    right = getattr(module, name)

    def zeros(*args, **kwargs):  # 4.0.0b30 and later return zeros for TE's window
        out = right(*args, **kwargs)
        return 0 * (out[0] if isinstance(out, tuple) else out)

    monkeypatch.setattr(module, name, zeros)
    assert "wrong attention" in flash_attention.self_test(flash_attention.as_te_calls(packed=packed), *heads)
