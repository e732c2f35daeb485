"""What follows from --global_batch_size, what `auto` chooses, and what is advised where nothing fits."""

import itertools
import math
import re
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from fp8_suite.benchmarks.plan.job import read_model
from fp8_suite.core.errors import EXIT_BAD_SETTING, UserError
from fp8_suite.core.gpus import GPUS, REFERENCE_GPU
from fp8_suite.core.recipes import RECIPES, TE_RECIPES
from fp8_suite.te_models.presets import LOCAL_PRESETS, PRESETS
from fp8_suite.te_models.settings import RECOMPUTE_LEVELS
from fp8_suite.te_models.shape import ModelShape
from fp8_suite.te_models.spec import find_model
from fp8_suite.training import prepare
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.estimate import advice, choose, memory, sizes
from fp8_suite.training.estimate.activations import kept_activations, recomputation_flops, stored_activations
from fp8_suite.training.estimate.memory import peak
from fp8_suite.training.estimate.setup import ModelSize, TrainingSetup
from fp8_suite.training.estimate.sizes import Sizing, global_batch, resolve_auto, room
from fp8_suite.training.estimate.step_time import step_seconds
from fp8_suite.training.optim.optimizer import OptimizerSpec
from fp8_suite.training.parallel.watchdog import Watchdog

FUSED = OptimizerSpec("fused_adamw", torch.bfloat16, True, ("fp32", "fp32"))
EIGHT_BITS = replace(FUSED, moment_dtypes=("fp8", "fp8"))
SHAPES = {
    1.2: ModelShape(2048, 16, 32, 8, 64, 8192, 128_256),
    8.0: ModelShape(4096, 32, 32, 8, 128, 14_336, 128_256),
    70.0: ModelShape(8192, 80, 64, 8, 128, 28_672, 128_256),
}
AUTO = {"batch_size": "auto"}


@pytest.fixture(autouse=True)
def _large_host(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(memory, "host_memory", lambda: 2 * 10**12)


def plan_of(billions=8.0, mode="single", gpus=1, optimizer=FUSED, **settings):
    cfg = config_from_dict({"model_name": "m", "use_te": True, "max_seq_length": 8192} | settings)
    model = ModelSize(int(billions * 1e9), SHAPES[billions])
    return TrainingSetup(cfg, model, optimizer, mode, gpus, min(gpus, 8))


def fitted(gb, billions=8.0, mode="single", gpus=1, **settings) -> Sizing:
    return sizes.choose_sizes(plan_of(billions, mode, gpus, **settings), gb * 1e9)


def split(found: Sizing) -> tuple[int, int]:
    return found.chosen.cfg.optim.batch_size, found.chosen.accumulation


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
    optim = resolve_auto(cfg, ranks).optim
    assert (optim.batch_size, optim.gradient_accumulation_steps) == expected
    assert math.prod(expected) * ranks == global_batch(cfg.optim, ranks)
    assert optim.global_batch_size == cfg.optim.global_batch_size
    assert resolve_auto(resolve_auto(cfg, ranks), ranks).optim == optim


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
        resolve_auto(config_from_dict(settings), ranks)
    assert error.value.exit_code == EXIT_BAD_SETTING
    for flag, value in re.findall(r"use (?:.* or )?--(\w+) (\d+)", str(error.value)):
        resolve_auto(config_from_dict(settings | {flag: value}), ranks)


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
    assert found.fits == (sum(peak(found.chosen).values()) <= room(gb * 1e9)) and found.is_choice
    if not found.fits:
        with pytest.raises(UserError, match="GB too much"):
            advice.refuse_misfit(found)


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
    unknown = Sizing(found.requested, found.chosen, None)
    assert unknown.describe() == f"fit: --batch_size {batch} x {accumulation} micro-batches" and unknown.fits


# Recomputation


@pytest.mark.parametrize("use_te", [True, False])
@pytest.mark.parametrize("length", [1024, 8192])
def test_recomputations_are_ordered_by_work_and_each_keeps_less(use_te, length):
    plan = plan_of(use_te=use_te, mixed_precision="fp8", max_seq_length=length, recompute="auto")
    values = [value for segment in sizes.recomputations(plan, 1) for value in segment]
    assert values[0] == "none" and values[-1] in ("full", "layer", "mlp")
    plans = [replace(plan, cfg=resolve_auto(plan.cfg, 1, 1, value)) for value in values]
    work, kept = ([count(each) for each in plans] for count in (recomputation_flops, stored_activations))
    assert work == sorted(work) and work[0] == 0
    assert kept[1:] == sorted(kept[1:], reverse=True)
    if use_te:
        assert values[1:3] == ["cheap:1", "cheap:2"] and "cheap" in values
    else:
        assert not any("cheap" in value or "full" in value for value in values)


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_level_keeps_less_than_the_one_before(recipe):
    use_te = recipe in TE_RECIPES
    plan = plan_of(use_te=use_te, mixed_precision="fp8", fp8_scenario=recipe)
    levels = RECOMPUTE_LEVELS if use_te else sizes.HF_LEVELS
    for model in (name for name in PRESETS if name not in LOCAL_PRESETS):
        sized = replace(plan, model=read_model(model).size)
        kept = [kept_activations(sized, level) for level in levels]
        assert all(more > less > 0 for more, less in itertools.pairwise(kept)), model


def test_zero3_has_no_cheap_recomputation():
    plan = plan_of(mode="ds_zero3", gpus=8, recompute="auto")
    assert not any("cheap" in value for segment in sizes.recomputations(plan, 1) for value in segment)


@pytest.mark.parametrize("gb", [400, 120, 100, 90, 80, 70, 60])
def test_auto_recomputes_as_little_as_fits(gb):
    settings = {"mode": "fsdp_full", "gpus": 8, "mixed_precision": "fp8", "batch_size": 2}
    found = fitted(gb, **settings, recompute="auto")
    values = [value for segment in sizes.recomputations(found.requested, 2) for value in segment]
    first = next((v for v in values if fitted(gb, **settings, recompute=v).fits), values[-1])
    assert found.chosen.cfg.model.recompute == first and split(found) == (2, 1)
    assert f", --recompute {first}; predicted" in found.describe()


def test_a_larger_micro_batch_forces_no_recomputation():
    """Without recomputation 1 x 8192 tokens fit, with it 8."""
    settings = {"mode": "fsdp_grad", "gpus": 8, "mixed_precision": "fp8", "global_batch_size": 64}
    found = fitted(120, **settings, batch_size="auto", recompute="auto")
    assert (*split(found), found.chosen.cfg.model.recompute) == (1, 8, "none")
    assert not fitted(120, **settings, batch_size=2).fits
    assert fitted(120, **settings, batch_size=8, recompute="auto").fits


def test_gathering_weights_in_every_micro_batch_is_worth_recomputation():
    settings = {"mode": "fsdp_full", "gpus": 8, "mixed_precision": "fp8", "global_batch_size": 64}
    settings |= {"max_seq_length": 4096}
    found = fitted(85.1, **settings, batch_size="auto", recompute="auto")
    assert split(found) == (8, 1) and found.chosen.cfg.model.recompute != "none"
    assert fitted(85.1, **settings, batch_size=1).fits


@pytest.mark.parametrize(("mode", "gpus"), [("single", 1), ("ddp", 4), ("fsdp_full", 16), ("ds_zero2", 8)])
@pytest.mark.parametrize("gb", [85, 150])
def test_no_other_micro_batch_is_predicted_to_be_faster(mode, gpus, gb):
    def seconds(found: Sizing) -> float:
        return sum(step_seconds(found.chosen, REFERENCE_GPU).values())

    settings = {"max_seq_length": 1024, "global_batch_size": 64 * gpus, "recompute": "auto"}
    settings |= {"mode": mode, "gpus": gpus, "mixed_precision": "fp8"}
    found = fitted(gb, 1.2, **settings, **AUTO)
    others = [fitted(gb, 1.2, **settings, batch_size=size) for size in (1, 2, 4, 8, 16, 32, 64)]
    assert seconds(found) <= 1.001 * min(seconds(other) for other in others if other.fits)


def test_a_micro_batch_that_waits_for_the_cpu_is_raised_by_recomputation():
    settings = {"global_batch_size": 1024, "max_seq_length": 512}
    two = fitted(400, **settings, batch_size=2).needed / 1e9 + 2.1
    assert split(fitted(two, **settings, **AUTO)) == (2, 512)
    found = fitted(two, **settings, **AUTO, recompute="auto")
    assert split(found)[0] >= 4 and found.chosen.cfg.model.recompute != "none" and found.fits
    few = fitted(two, **settings | {"global_batch_size": 2}, **AUTO, recompute="auto")
    assert split(few) == (2, 1) and few.chosen.cfg.model.recompute == "none", "there are no more"


# Advice


def test_what_cannot_fit_is_refused_with_numbers_and_flags_that_fit():
    settings = {"global_batch_size": 64, "batch_size": "auto", "recompute": "auto", "mixed_precision": "fp8"}
    found = fitted(85.1, **settings)
    with pytest.raises(UserError) as error:
        advice.refuse_misfit(found)
    text = str(error.value)
    start = "--batch_size auto --recompute auto: even with 1 x 8192 tokens and --recompute full a step is "
    assert text.startswith(f"{start}predicted to need {found.needed / 1e9:.1f} of 85.1 GB")
    assert f", {(found.needed - 83.1e9) / 1e9:.1f} GB too much; " in text
    assert error.value.exit_code == EXIT_BAD_SETTING and error.value.flags == {"batch_size", "recompute"}
    gpus, mode = re.search(r"(\d+) GPUs with --sharding_mode (\w+) need", text).groups()
    assert fitted(85.1, mode=mode, gpus=int(gpus), **settings).fits
    offloaded = replace(FUSED, offload=True)
    assert "; --offload_optimizer needs" in text and fitted(85.1, optimizer=offloaded, **settings).fits
    alone = "alone each saves too little"
    assert "--offload_optimizer --grad_reduce_dtype bf16 needs" in advice.advise(fitted(50, **settings)), (
        alone
    )
    assert not fitted(50, optimizer=offloaded, **settings).fits
    assert fitted(50, optimizer=offloaded, grad_reduce_dtype="bf16", **settings).fits


def test_what_changes_numerics_is_advised_with_what_it_saves():
    settings = {"global_batch_size": 64, "batch_size": "auto", "recompute": "auto", "mixed_precision": "fp8"}
    text = advice.advise(fitted(110, **settings))
    needs, less = re.search(r"--moment_dtype fp8 needs ([\d.]+) GB, ([\d.]+) GB less", text).groups()
    assert float(needs) <= 108 and float(less) > 0


def test_sums_of_whole_gradients_that_do_not_fit_need_a_smaller_step():
    settings = {"batch_size": "auto", "recompute": "auto", "mode": "fsdp_full", "gpus": 64}
    found = fitted(150, 70.0, **settings, global_batch_size=4096)
    assert found.needed > 280e9, "FP32 sums of all gradients"
    total = int(re.search(r"or --global_batch_size (\d+) needs", advice.advise(found))[1])
    assert total > 64 and fitted(150, 70.0, **settings, global_batch_size=total).fits


@pytest.mark.parametrize(
    ("settings", "replaced"),
    [
        ({"batch_size": 8, "gradient_accumulation_steps": 4}, "--gradient_accumulation_steps"),
        ({"batch_size": 32, "gradient_checkpointing": True}, "--gradient_checkpointing"),
    ],
)
def test_settings_that_the_advised_flags_replace_are_named(settings, replaced):
    text = advice.advise(fitted(110, mode="fsdp_full", gpus=8, mixed_precision="fp8", **settings))
    assert text.startswith(
        f"--global_batch_size 256 --batch_size auto --recompute auto without {replaced} needs "
    )


def test_a_single_accumulation_step_that_prevents_a_fit_is_named():
    auto = {
        "global_batch_size": 256,
        "batch_size": "auto",
        "recompute": "auto",
        "gradient_accumulation_steps": 1,
    }
    text = advice.advise(fitted(110, mode="fsdp_full", gpus=8, mixed_precision="fp8", **auto))
    assert text.startswith("without --gradient_accumulation_steps needs ")


def test_advice_keeps_settings_that_exclude_auto():
    settings = {"batch_size": 1, "recompute": "full", "offload_activations": True, "mixed_precision": "fp8"}
    text = advice.advise(fitted(85.1, **settings))
    assert "auto" not in text and text.startswith("--moment_dtype fp8 needs ")


def test_more_gpus_are_advised_with_a_sequence_for_each_and_without_groups():
    fp8 = {"mixed_precision": "fp8"}
    groups = {"sharding_mode": "hsdp", "hsdp_shard_size": 8, "batch_size": 1}
    text = advice.advise(fitted(60, 70.0, mode="hsdp", gpus=8, **groups, **fp8))
    assert text.startswith("with --global_batch_size 8 --batch_size auto --recompute auto, ")
    way = r"(\d+) GPUs with --sharding_mode fsdp_full, --global_batch_size (\d+) instead of 8"
    gpus, total = map(int, re.search(f"{way} without --hsdp_shard_size need", text).groups())
    assert gpus == total > 8
    auto = {"batch_size": "auto", "recompute": "auto", "global_batch_size": total}
    assert fitted(60, 70.0, "fsdp_full", gpus, **auto, **fp8).fits


def test_a_model_too_large_for_any_number_of_gpus_is_refused():
    found = fitted(4, 70.0, "ddp", 8, global_batch_size=8, batch_size="auto")
    with pytest.raises(UserError, match=r"no setting makes it fit; use a smaller model$"):
        advice.refuse_misfit(found)


def test_fp8_weights_are_advised_on_one_gpu_only():
    settings = {"mixed_precision": "fp8", "batch_size": 1, "recompute": "auto"}
    assert "--offload_optimizer --fp8_weights needs" in advice.advise(fitted(34, **settings))
    for mode, gb in (("ddp", 30), ("fsdp_full", 20)):
        found = fitted(gb, 70.0, mode=mode, gpus=8, **settings)
        assert not found.fits and "--fp8_weights" not in advice.advise(found)
    small = {"fp8_weights": True, "offload_optimizer": True, "moment_dtype": "fp8"}
    optimizer = replace(EIGHT_BITS, offload=True, holds_fp8_weights=True)
    text = advice.advise(fitted(15, **settings, **small, optimizer=optimizer))
    assert re.search(r"GPUs with --sharding_mode fsdp_full, .* without --fp8_weights need", text), text


@pytest.mark.parametrize(("gb", "warns"), [(150, False), (133, False), (132, True)])
def test_a_step_clearly_above_the_memory_is_warned_of(gb, warns):
    """One sequence of the 8B needs 146.2 GB."""
    text = advice.warning(fitted(gb, batch_size=1, mixed_precision="fp8"))
    assert bool(text) == warns
    if warns:
        assert text.startswith(
            "WARNING: a step is predicted to need 146.2 of 132.0 GB: it will probably run out"
        )


def test_what_changes_no_numerics_is_advised_first():
    settings = {"mixed_precision": "fp8", "moment_dtype": "fp8", "optimizer": EIGHT_BITS}
    text = advice.warning(fitted(150.1, batch_size=8, **settings))
    needs = re.search(
        r"memory; --global_batch_size 8 --batch_size auto --recompute auto needs ([\d.]+) GB$", text
    )
    other = fitted(150.1, global_batch_size=8, batch_size="auto", recompute="auto", **settings)
    assert needs[1] == f"{other.needed / 1e9:.1f}"


def test_offload_is_advised_only_if_the_host_has_the_memory(monkeypatch):
    found = fitted(60, mixed_precision="fp8", batch_size=1, recompute="auto")
    assert re.search(r"--offload_optimizer needs .* less, and \d+ GB of host memory", advice.advise(found))
    monkeypatch.setattr(memory, "host_memory", lambda: 10**9)
    assert "--offload" not in advice.advise(found)


# In training


def chosen(free, model="tiny-qwen3", effective="delayed", **settings):
    cfg = config_from_dict({"model_name": model, "use_te": True, "mixed_precision": "fp8"} | settings)
    plan = find_model(model, init="auto", use_te=True)
    return choose._choose_sizes(cfg, plan, torch.device("cuda"), effective, "single", free)


def test_training_plans_with_the_size_of_its_model():
    found = chosen(3e9, batch_size="auto", recompute="auto", global_batch_size=48)
    size = read_model("tiny-qwen3").size
    assert found.chosen.model == size and found.chosen.gpus == 1 and found.fits
    predicted = f"predicted {found.needed / 1e9:.1f} of 3.0 GB"
    assert found.describe() == f"fit: --batch_size 48 x 1 micro-batch, --recompute layer; {predicted}"
    with pytest.raises(UserError, match=r"--batch_size auto --recompute auto: even with 1 x 1024 tokens and"):
        chosen(2.1e9, batch_size="auto", recompute="auto", global_batch_size=48)
    assert not chosen(2.1e9, batch_size=48).fits, "what is given is not refused"


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("X", None),
    ],
)
def test_training_chooses_for_the_speed_of_its_gpu(name, gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    settings = {"batch_size": "auto", "recompute": "auto", "global_batch_size": 48}
    found = chosen(3e9, effective="bf16", mixed_precision="bf16", **settings)
    assert found.gpu == (GPUS[gpu] if gpu else REFERENCE_GPU)
    assert advice.resize(found, {"moment_dtype": "fp8"}).gpu == found.gpu


@pytest.mark.parametrize("requested", ["mxfp8", "nvfp4"])
def test_a_recipe_that_falls_back_is_predicted_as_the_one_that_runs(requested):
    settings = {"batch_size": 8, "fp8_scenario": requested}
    expected, found = chosen(3e9, batch_size=8), chosen(3e9, **settings)
    assert found.needed == expected.needed != chosen(3e9, **settings, effective=requested).needed
    assert advice.resize(found, {"moment_dtype": "fp8"}).chosen.recipe == "delayed"


def test_training_plans_with_the_recipe_that_it_falls_back_to():
    flags = {"model_name": "tiny-llama", "use_te": True, "te_backend": "emulated", "mixed_precision": "fp8"}
    cfg = config_from_dict(flags | {"fp8_scenario": "nvfp4"})  # not emulated
    with ExitStack() as cleanup:
        resolved, *_, found = prepare._decide(cfg, torch.device("cpu"), Watchdog(1.0), cleanup)
    assert (resolved.precision.requested, found.chosen.recipe) == ("nvfp4", "delayed")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision_map": "layers.0=bf16"}, "--batch_size auto: .* is unknown, as --precision_map layers.0"),
        ({"use_te": False, "compile": False}, "--batch_size auto: .* as layers without torch.compile keep"),
        ({"te_backend": "emulated", "recompute": "auto"}, "--batch_size auto --recompute auto: .* --te_back"),
    ],
)
def test_auto_is_refused_where_memory_is_unknown(settings, message):
    with pytest.raises(UserError, match=message):
        chosen(3e9, **settings, **AUTO)
    known = {name: value for name, value in settings.items() if name != "recompute"}
    assert chosen(3e9, **known).predicted_gb is None
    only_evaluates = chosen(3e9, **settings, **AUTO, max_steps=0)
    assert split(only_evaluates) == (8, 1) and only_evaluates.chosen.cfg.model.recompute == "none"


def test_numerics_are_advised_on_top_of_what_changes_none():
    text = advice.warning(fitted(85.1, batch_size=8, max_seq_length=4096, mixed_precision="fp8"))
    auto = "with --global_batch_size 8 --batch_size auto --recompute auto, "
    assert f"memory; {auto}--moment_dtype fp8 needs " in text
