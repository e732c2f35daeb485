"""What follows from --global_batch_size, what `auto` chooses, and what is advised where nothing fits."""

import math
import re

import pytest
import torch

from core.errors import EXIT_BAD_SETTING, UserError
from training.config import config_from_dict
from training.optim.optimizer import OptimizerPlan
from training.parallel import fit
from training.parallel.fit import Fit, global_batch, room, split_batch
from training.parallel.memory import peak
from training.parallel.step_plan import ModelSize, StepPlan
from training.tracking.metrics import ModelShape

FUSED = OptimizerPlan("fused_adamw", torch.bfloat16, True, ("fp32", "fp32"))
SHAPES = {
    1.2: ModelShape(2048, 16, 32, 8, 64, 8192, 128_256),
    8.0: ModelShape(4096, 32, 32, 8, 128, 14_336, 128_256),
    70.0: ModelShape(8192, 80, 64, 8, 128, 28_672, 128_256),
}
AUTO = {"batch_size": "auto"}


def plan_of(billions=8.0, mode="single", gpus=1, **settings):
    cfg = config_from_dict({"model_name": "m", "use_te": True, "max_seq_length": 8192} | settings)
    model = ModelSize(int(billions * 1e9), SHAPES[billions])
    return StepPlan(cfg, model, FUSED, mode, gpus, min(gpus, 8))


def fitted(gb, billions=8.0, mode="single", gpus=1, **settings) -> Fit:
    return fit.fit(plan_of(billions, mode, gpus, **settings), gb * 1e9)


def split(found: Fit) -> tuple[int, int]:
    return found.plan.cfg.optim.batch_size, found.plan.accumulation


# The global batch


@pytest.mark.parametrize(
    ("settings", "ranks", "expected"),
    [
        ({}, 4, (8, 1)),
        ({"batch_size": 2, "gradient_accumulation_steps": 3}, 4, (2, 3)),
        ({"batch_size": 2, "global_batch_size": 48}, 4, (2, 6)),
        ({"batch_size": 2, "global_batch_size": 48, "gradient_accumulation_steps": 6}, 4, (2, 6)),
        ({"global_batch_size": 48, "gradient_accumulation_steps": 4} | AUTO, 4, (3, 4)),
        ({"global_batch_size": 48} | AUTO, 4, (6, 2)),  # without a GPU: a divisor of 12, at most the default
        ({"global_batch_size": 1024} | AUTO, 4, (8, 32)),
        ({"global_batch_size": 68} | AUTO, 4, (1, 17)),
        (AUTO, 4, (8, 1)),
        ({"gradient_accumulation_steps": 3} | AUTO, 4, (8, 3)),
    ],
)
def test_accumulation_follows_from_the_global_batch(settings, ranks, expected):
    cfg = config_from_dict(settings)
    optim = split_batch(cfg, ranks).optim
    assert (optim.batch_size, optim.gradient_accumulation_steps) == expected
    assert math.prod(expected) * ranks == global_batch(cfg.optim, ranks)
    assert optim.global_batch_size == cfg.optim.global_batch_size
    assert split_batch(split_batch(cfg, ranks), ranks).optim == optim


@pytest.mark.parametrize(
    ("settings", "ranks", "message"),
    [
        ({"global_batch_size": 50}, 4, "--global_batch_size 50: cannot be shared by 4 ranks; use 48"),
        ({"global_batch_size": 3}, 4, "--global_batch_size 3: .*; use 4"),
        (
            {"global_batch_size": 100},
            2,
            "--global_batch_size 100 --batch_size 8: each of 2 ranks has 50 sequences per step; use "
            "--batch_size 10, or --global_batch_size 96",
        ),
        (
            {"global_batch_size": 64, "gradient_accumulation_steps": 3} | AUTO,
            2,
            "--global_batch_size 64 --gradient_accumulation_steps 3: each of 2 ranks has 32 sequences per "
            "step; use --gradient_accumulation_steps [24], or --global_batch_size 66",
        ),
        (
            {"global_batch_size": 64, "gradient_accumulation_steps": 3},
            2,
            "--global_batch_size 64 --batch_size 8 --gradient_accumulation_steps 3: the last two give 48 on "
            "2 ranks; drop one of them",
        ),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused_with_the_nearest_that_can(settings, ranks, message):
    with pytest.raises(UserError, match=f"^{message}$") as error:
        split_batch(config_from_dict(settings), ranks)
    assert error.value.exit_code == EXIT_BAD_SETTING
    for flag, value in re.findall(r"use (?:.* or )?--(\w+) (\d+)", str(error.value)):
        split_batch(config_from_dict(settings | {flag: value}), ranks)


# The choice


@pytest.mark.parametrize("billions", SHAPES)
@pytest.mark.parametrize(("mode", "gpus"), [("single", 1), ("ddp", 4), ("fsdp_full", 16)])
@pytest.mark.parametrize("total", [None, 16, 192])
@pytest.mark.parametrize("gb", [25, 85, 150, 400])
def test_auto_is_the_largest_micro_batch_that_fits(billions, mode, gpus, total, gb):
    settings = {"max_seq_length": 2048, "global_batch_size": total}
    found = fitted(gb, billions, mode, gpus, **settings, **AUTO)
    batch, accumulation = split(found)
    assert batch * accumulation * gpus == (total or 8 * gpus)
    larger = [size for size in range(batch + 1, 65) if batch * accumulation % size == 0]
    if total:
        fits = {n: fitted(gb, billions, mode, gpus, **settings, batch_size=n).fits for n in (*larger, batch)}
        assert not any(fits[size] for size in larger) and fits[batch] == found.fits
    assert found.fits == (sum(peak(found.plan).values()) <= room(gb * 1e9)) and found.is_choice
    if not found.fits:
        with pytest.raises(UserError, match="GB too much"):
            fit.refuse_misfit(found)


def test_numbers_are_kept_and_only_predicted():
    found = fitted(20, batch_size=4, gradient_accumulation_steps=2)
    assert split(found) == (4, 2) and not found.fits and not found.is_choice
    assert fitted(20, batch_size=4, global_batch_size=8).is_choice, "accumulation follows"


def test_a_batch_in_one_micro_batch_saves_the_sums_of_gradients():
    """Larger may need less: without accumulation FSDP keeps no whole gradients."""
    settings = {"mode": "fsdp_full", "gpus": 8, "global_batch_size": 16, "max_seq_length": 1024}
    whole, halves = (fitted(400, batch_size=batch, **settings) for batch in (2, 1))
    assert whole.needed < halves.needed
    assert split(fitted(whole.needed / 1e9 + 2.1, **settings, **AUTO)) == (2, 1)


def test_the_choice_is_one_line_with_the_prediction():
    found = fitted(150.1, 1.2, global_batch_size=64, **AUTO)
    batch, accumulation = split(found)
    gb = f"{found.needed / 1e9:.1f} of 150.1 GB"
    assert found.describe() == f"fit: --batch_size {batch} x {accumulation} micro-batches; predicted {gb}"
    assert batch > 1 and found.predicted_gb == found.needed / 1e9 < 148.1
    unknown = Fit(found.request, found.plan, None)
    assert unknown.describe() == f"fit: --batch_size {batch} x {accumulation} micro-batches" and unknown.fits


# Advice


def test_what_cannot_fit_is_refused_with_numbers_and_flags_that_fit():
    found = fitted(85.1, global_batch_size=64, **AUTO)
    with pytest.raises(UserError) as error:
        fit.refuse_misfit(found)
    text = str(error.value)
    assert text.startswith("--batch_size auto: with 1 x 8192 tokens, the least, a step is predicted to need ")
    assert f"{found.needed / 1e9:.1f} of 85.1 GB, {(found.needed - 83.1e9) / 1e9:.1f} GB too much" in text
    assert error.value.exit_code == EXIT_BAD_SETTING and error.value.flags == {"batch_size"}
    gpus, mode = re.search(r"(\d+) GPUs with --sharding_mode (\w+) need", text).groups()
    assert fitted(85.1, mode=mode, gpus=int(gpus), global_batch_size=64, **AUTO).fits
    assert "--moment_dtype" not in text, "alone it saves too little"
    text = fit.advice(fitted(130, global_batch_size=64, **AUTO))
    flags = re.search(r"--moment_dtype fp8 needs ([\d.]+) GB, ([\d.]+) less", text)
    assert float(flags[2]) == pytest.approx(8.0 * 6, abs=0.5) and float(flags[1]) < 128


def test_a_model_for_no_gpu_is_refused_plainly():
    found = fitted(4, 70.0, "ddp", 8, global_batch_size=8, batch_size="auto")
    with pytest.raises(UserError, match=r"no setting makes it fit; use a smaller model$"):
        fit.refuse_misfit(found)


@pytest.mark.parametrize(("gb", "warns"), [(150, False), (130, True)])
def test_numbers_that_are_clearly_too_large_are_warned_of_with_a_way_out(gb, warns):
    """10 % above 132.9 GB."""
    text = fit.warning(fitted(gb, batch_size=1, mixed_precision="fp8"))
    assert bool(text) == warns
    if warns:
        start = "WARNING: a step is predicted to need 146.2 of 130.0 GB: it will probably run out of memory; "
        assert text.startswith(f"{start}--moment_dtype fp8 needs")


def test_a_smaller_micro_batch_is_advised_before_anything_that_changes_numerics():
    found = fitted(150.1, batch_size=8, mixed_precision="fp8", moment_dtype="fp8", grad_reduce_dtype="bf16")
    text = fit.warning(found)
    assert re.search(r"out of memory; --global_batch_size 8 --batch_size auto needs [\d.]+ GB$", text)
