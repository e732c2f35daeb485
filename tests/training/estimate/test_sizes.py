"""What follows from --global_batch_size, and the micro-batch and recomputation that `auto` chooses."""

import math
from dataclasses import replace

import pytest
from fp8_suite.core.errors import EXIT_BAD_SETTING, UserError
from fp8_suite.core.gpus import REFERENCE_GPU
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.estimate import sizes
from fp8_suite.training.estimate.activations import recomputation_flops, stored_activations
from fp8_suite.training.estimate.memory import peak, peak_with_caches
from fp8_suite.training.estimate.sizes import Sizing, for_tensors, global_batch, with_sizes
from fp8_suite.training.estimate.step_time import step_seconds

from tests.training.estimate.setups import SHAPES, setup_of

AUTO = {"batch_size": "auto"}


def fitted(gb, billions=8.0, mode="single", gpus=1, **settings) -> Sizing:
    return sizes.choose_sizes(setup_of(billions, mode, gpus, **settings), gb * 1e9)


def split(sizing: Sizing) -> tuple[int, int]:
    return sizing.chosen.cfg.optim.batch_size, sizing.chosen.accumulation


@pytest.mark.parametrize(
    ("settings", "ranks", "expected"),
    [
        ({"batch_size": 2, "gradient_accumulation_steps": 3}, 4, (2, 3)),
        ({"batch_size": 2, "global_batch_size": 48}, 4, (2, 6)),
        ({"batch_size": 2, "global_batch_size": 48, "gradient_accumulation_steps": 6}, 4, (2, 6)),
        ({"global_batch_size": 48, "gradient_accumulation_steps": 4} | AUTO, 4, (3, 4)),
        ({"global_batch_size": 48} | AUTO, 4, (6, 2)),  # without a GPU: a divisor of 12, at most the default
        ({"global_batch_size": 1024} | AUTO, 4, (8, 32)),
        ({"gradient_accumulation_steps": 3} | AUTO, 4, (8, 3)),
    ],
)
def test_accumulation_follows_from_the_global_batch(settings, ranks, expected):
    cfg = config_from_dict(settings)
    optim = with_sizes(cfg, ranks).optim
    assert (optim.batch_size, optim.gradient_accumulation_steps) == expected
    assert math.prod(expected) * ranks == global_batch(cfg, ranks)
    assert optim.global_batch_size == cfg.optim.global_batch_size
    assert with_sizes(with_sizes(cfg, ranks), ranks).optim == optim


@pytest.mark.parametrize(
    ("settings", "ranks", "nearest"),
    [
        ({"global_batch_size": 50, "batch_size": 1}, 4, 48),
        ({"global_batch_size": 3} | AUTO, 4, 4),
        ({"global_batch_size": 100}, 2, 96),
        ({"global_batch_size": 64, "gradient_accumulation_steps": 3} | AUTO, 2, 66),
        ({"global_batch_size": 64, "gradient_accumulation_steps": 3}, 2, 48),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused_with_the_nearest_that_can(settings, ranks, nearest):
    with pytest.raises(UserError, match=f"cannot be shared by {ranks} ranks; use {nearest} ") as error:
        with_sizes(config_from_dict(settings), ranks)
    assert error.value.exit_code == EXIT_BAD_SETTING
    with_sizes(config_from_dict(settings | {"global_batch_size": nearest}), ranks)


@pytest.mark.parametrize("billions", SHAPES)
@pytest.mark.parametrize(("mode", "gpus"), [("single", 1), ("ddp", 4), ("fsdp_full", 16)])
@pytest.mark.parametrize("total", [None, 16, 192])
@pytest.mark.parametrize("gb", [25, 85, 150, 400])
def test_auto_is_the_largest_micro_batch_that_fits(billions, mode, gpus, total, gb):
    settings = {"max_seq_length": 2048, "global_batch_size": total}
    sizing = fitted(gb, billions, mode, gpus, **settings, **AUTO)
    batch, accumulation = split(sizing)
    assert batch * accumulation * gpus == (total or 8 * gpus)
    larger = [size for size in range(batch + 1, 65) if batch * accumulation % size == 0]
    if total:
        sizings = {n: fitted(gb, billions, mode, gpus, **settings, batch_size=n) for n in (*larger, batch)}
        rule = "has_room" if sizing.has_room else "fits"
        assert not any(getattr(sizings[size], rule) for size in larger) and sizings[batch].fits == sizing.fits
    assert sizing.fits == (sum(peak(sizing.chosen).values()) <= for_tensors(gb * 1e9)) and sizing.is_choice


def test_numbers_are_kept_and_only_predicted():
    sizing = fitted(20, batch_size=4, gradient_accumulation_steps=2)
    assert split(sizing) == (4, 2) and not sizing.fits and not sizing.is_choice
    assert fitted(20, batch_size=4, global_batch_size=8).is_choice, "accumulation follows"


def test_a_batch_in_one_micro_batch_saves_the_sums_of_gradients():
    """Larger may need less: without accumulation FSDP keeps no whole gradients."""
    settings = {"mode": "fsdp_full", "gpus": 8, "global_batch_size": 16, "max_seq_length": 1024}
    one, two = (fitted(400, batch_size=batch, **settings) for batch in (2, 1))
    assert one.needed < two.needed
    assert split(fitted(one.needed / 1e9 + 2.1, **settings, **AUTO)) == (2, 1)


@pytest.mark.parametrize("use_te", [True, False])
@pytest.mark.parametrize("length", [1024, 8192])
def test_recomputations_are_ordered_by_work_and_each_keeps_less(use_te, length):
    setup = setup_of(use_te=use_te, mixed_precision="fp8", max_seq_length=length, recompute="auto")
    values = [value for segment in sizes.recomputations(setup, 1) for value in segment]
    assert values[0] == "none" and values[-1] in ("full", "layer", "mlp")
    setups = [replace(setup, cfg=with_sizes(setup.cfg, 1, 1, value)) for value in values]
    work, kept = ([count(setup) for setup in setups] for count in (recomputation_flops, stored_activations))
    assert work == sorted(work) and work[0] == 0
    assert kept[1:] == sorted(kept[1:], reverse=True)
    if use_te:
        assert values[1:3] == ["cheap:1", "cheap:2"] and "cheap" in values
    else:
        assert not any("cheap" in value or "full" in value for value in values)


def test_zero3_has_no_cheap_recomputation():
    setup = setup_of(mode="ds_zero3", gpus=8, recompute="auto")
    assert not any("cheap" in value for segment in sizes.recomputations(setup, 1) for value in segment)


@pytest.mark.parametrize("gb", [400, 120, 100, 90, 80, 70, 60])
def test_auto_recomputes_as_little_as_fits(gb):
    settings = {"mode": "fsdp_full", "gpus": 8, "mixed_precision": "fp8", "batch_size": 2}
    sizing = fitted(gb, **settings, recompute="auto")
    values = [value for segment in sizes.recomputations(sizing.requested, 2) for value in segment]
    first = next((v for v in values if fitted(gb, **settings, recompute=v).has_room), values[-1])
    assert sizing.chosen.cfg.model.recompute == first and split(sizing) == (2, 1)
    assert f", --recompute {first}; predicted" in sizing.describe()


def test_auto_leaves_room_for_the_caches_of_fsdp_and_fills_the_gpu_if_it_must():
    settings = {
        "gpus": 2,
        "mode": "fsdp_full",
        "mixed_precision": "fp8",
        "batch_size": 1,
        "max_seq_length": 32768,
    }

    def in_gb(needed: float, recompute: str) -> Sizing:
        return fitted(needed / 1e9 + 2.1, **settings, recompute=recompute)

    mlp, full = (fitted(400, **settings, recompute=level).needed for level in ("mlp", "full"))
    filling, chosen, smallest = in_gb(mlp, "mlp"), in_gb(mlp, "auto"), in_gb(full, "auto")
    assert filling.fits and not filling.has_room
    assert chosen.has_room and chosen.needed < mlp
    assert smallest.fits and not smallest.has_room
    parameters = chosen.chosen.model.parameters  # gradients of half of them, and the root's buffers
    assert 2.0 * parameters / 2 < peak_with_caches(chosen.chosen) - chosen.needed < 2.0 * parameters


@pytest.mark.parametrize(("mode", "gpus"), [("single", 1), ("ddp", 4), ("fsdp_full", 16), ("ds_zero2", 8)])
@pytest.mark.parametrize("gb", [85, 150])
def test_no_other_micro_batch_is_predicted_to_be_faster(mode, gpus, gb):
    def seconds(sizing: Sizing) -> float:
        return sum(step_seconds(sizing.chosen, REFERENCE_GPU).values())

    settings = {"max_seq_length": 1024, "global_batch_size": 64 * gpus, "recompute": "auto"}
    settings |= {"mode": mode, "gpus": gpus, "mixed_precision": "fp8"}
    sizing = fitted(gb, 1.2, **settings, **AUTO)
    sizings = [fitted(gb, 1.2, **settings, batch_size=size) for size in (1, 2, 4, 8, 16, 32, 64)]
    assert seconds(sizing) <= 1.001 * min(seconds(candidate) for candidate in sizings if candidate.has_room)


def test_without_predictions_a_pipeline_gets_micro_batches_for_its_stages():
    setup = setup_of(mode="ddp", gpus=2, global_batch_size=8, pipeline_parallel_size=2, **AUTO)
    assert split(sizes.unpredicted_sizes(setup, None)) == (4, 2)
