"""FP8 weights: the same training as from BF16 weights with current scaling, in less memory."""

import pytest
import torch
from fp8_suite.te_models.fp8_weights import quantize_weights
from safetensors.torch import load_file

from tests.gpu.models import batch, build, spec
from tests.gpu.test_offload import assert_same_bits, checkpoint
from tests.gpu.test_run import SMALL, losses, train
from tests.gpu.test_te_model import fp8

pytestmark = pytest.mark.gpu
FLAGS = f"{SMALL} --mixed_precision fp8 --moment_dtype fp8 --offload_optimizer"


@pytest.mark.parametrize("recompute", ["none", "cheap", "full", "mlp:2+layer"])
def test_losses_and_gradients_are_those_of_weights_cast_in_every_pass(recompute, monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    autocast, results = fp8("current"), {}
    for stored in (False, True):
        model = build(spec(layers=4), use_te=True, packed=False, recompute=recompute)
        originals = quantize_weights(model) if stored else {}
        assert len(originals) == 16 * stored
        for name, weight in originals.items():
            assert model.get_parameter(name)._data.nbytes == weight.nbytes / 2
        for seed in range(2):
            with autocast():
                loss = model(**batch([[256]] * 8, packed=False, seed=seed)).loss
            loss.backward()
            results.setdefault(stored, []).append(loss.detach())
        results[stored] += [parameter.grad for parameter in model.parameters()]
        transposes = [getattr(parameter, "_transpose", None) for parameter in model.parameters()]
        assert transposes == [None] * len(transposes)
    assert all(torch.equal(a, b) for a, b in zip(results[True], results[False], strict=True))


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_run_is_that_of_weights_cast_once_per_step(tmp_path, micro_batches):
    flags = f"{FLAGS} --fp8_scenario current --gradient_accumulation_steps {micro_batches}"
    plain, stored = tmp_path / "plain", tmp_path / "stored"
    train(plain, flags)
    output = train(stored, f"{flags} --fp8_weights")
    assert "fused AdamW, FP8 weights with FP32 masters, FP8 moments, offloaded" in output
    assert losses(stored) == losses(plain)
    expected = checkpoint(plain, 12)
    assert_same_bits(expected, checkpoint(stored, 12))
    assert_same_bits(*(load_file(folder / "export" / "model.safetensors") for folder in (plain, stored)))


def test_delayed_scaling_resumes_and_evaluates_bit_for_bit(tmp_path):
    flags = f"{FLAGS} --gradient_accumulation_steps 2 --fp8_stats_interval 4 --fp8_weights"
    uninterrupted, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(uninterrupted, flags)
    train(resumed, f"{flags} --resume {uninterrupted}/checkpoints/step_000006")
    assert losses(resumed) == {at: loss for at, loss in losses(uninterrupted).items() if at > 6}
    assert_same_bits(checkpoint(uninterrupted, 12), checkpoint(resumed, 12))
    last = min(losses(uninterrupted).values())
    assert last < losses(uninterrupted)[1] - 0.5


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_a_run_resumes_with_and_without(tmp_path, recipe):
    flags = f"{FLAGS} --fp8_scenario {recipe} --gradient_accumulation_steps 2 --no_export"
    runs = {"plain": "", "stored": "--fp8_weights"}
    for name, options in runs.items():
        train(tmp_path / name, f"{flags} {options}")
    for origin, options in (("plain", "--fp8_weights"), ("stored", "")):
        resumed = tmp_path / f"from-{origin}"
        train(resumed, f"{flags} {options} --resume {tmp_path / origin}/checkpoints/step_000006")
        for step, loss in losses(resumed).items():
            expected = losses(tmp_path / origin)[step]
            assert loss == (expected if recipe == "current" else pytest.approx(expected, rel=1e-2))
