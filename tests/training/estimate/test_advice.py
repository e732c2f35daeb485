"""Refusals of what cannot fit, and ways out that do fit."""

import re
import shlex
from dataclasses import replace

import pytest
from fp8_suite.core.errors import EXIT_BAD_SETTING, UserError
from fp8_suite.training.config import build_parser, config_from_dict
from fp8_suite.training.estimate import advice, memory
from fp8_suite.training.estimate.sizes import Sizing, choose_sizes, unpredicted_sizes

from tests.training.estimate.setups import FP8_MOMENTS, OFFLOADED, ZERO, setup_of

AUTO = {"batch_size": "auto", "recompute": "auto"}
FP8 = {"mixed_precision": "fp8"}
CHECKPOINTED = {"batch_size": 32, "gradient_checkpointing": True, "gradient_accumulation_steps": 4}
OFFLOADED_ACTIVATIONS = {"recompute": "full", "offload_activations": True}
DEFAULTS = config_from_dict({}).to_dict()


@pytest.fixture(autouse=True)
def _large_host(monkeypatch):
    monkeypatch.setattr(memory, "host_memory", lambda: 2 * 10**12)


def sized(gb, *where, **settings) -> Sizing:
    return choose_sizes(setup_of(*where, **FP8 | settings), gb * 1e9)


def followed(sizing: Sizing, text: str) -> Sizing | None:
    """Return the sizing with the advised flags, as training would choose it."""
    flags, dropped, needed = re.search(r"use (.*?)(?: without (.*?))? \(([\d.]+) GB", text).groups()
    changes = vars(build_parser("p", "d").parse_args(shlex.split(flags)))
    changes |= {name: DEFAULTS[name] for name in re.findall(r"--(\w+)", dropped or "")}
    changes.pop("config")
    if "global_batch_size" in changes:
        changes["gradient_accumulation_steps"] = None
    candidate = advice.resized(sizing, changes)
    assert f"{candidate.needed / 1e9:.1f}" == needed
    return candidate


@pytest.mark.parametrize(
    ("gb", "where", "settings", "flags"),
    [
        (150, (), {"batch_size": 8}, "use --global_batch_size 8 --batch_size auto --recompute auto ("),
        (110, (), AUTO, "use --moment_dtype fp8 ("),
        (60, (), AUTO, "use --offload_optimizer ("),
        (50, (), AUTO | {"global_batch_size": 64}, "use --offload_optimizer --moment_dtype fp8 --grad_r"),
        (34, (), AUTO, "bf16 --fp8_weights ("),
        (85, (), OFFLOADED_ACTIVATIONS, "--batch_size auto --moment_dtype fp8 ("),
        (110, (8.0, "ddp", 8), AUTO | {"sharding_mode": "ddp"}, "use --sharding_mode fsdp_full ("),
        (40, (8.0, "ddp", 8), AUTO | {"sharding_mode": "auto"}, "use --context_parallel_size 2 ("),
        (110, (8.0, "fsdp_full", 8), CHECKPOINTED, "without --gradient_accumulation_steps ("),
        (22, (), AUTO | {"lora_rank": 16, "use_te": True}, "use --fp8_weights ("),
    ],
)
def test_the_first_way_out_of_the_table_fits_as_predicted(gb, where, settings, flags):
    mode = where[1] if where[1:] else "auto"
    sizing = sized(gb, *where, **{"sharding_mode": mode} | settings)
    text = advice.way_out(sizing)
    assert not sizing.fits and text.count("use ") == 1 and flags in text
    assert followed(sizing, text).fits


@pytest.mark.parametrize("mode", ["auto", "fsdp_full"])
def test_a_state_that_a_gpu_cannot_hold_is_refused(mode):
    sizing = sized(13.9, 8.0, "fsdp_full", 8, batch_size=1, sharding_mode=mode)
    with pytest.raises(UserError, match=r"--sharding_mode fsdp_full: .* need 14\.0 of 13\.9") as error:
        advice.refuse_misfit(sizing)
    assert error.value.exit_code == EXIT_BAD_SETTING and error.value.flags == {"model_name"}
    assert followed(sizing, str(error.value)).fits
    unpredicted = unpredicted_sizes(sizing.requested, sizing.free)
    assert advice.way_out(unpredicted) == "use --moment_dtype fp8 (8.0 GB)", "only the state is known"


def test_values_of_auto_that_do_not_fit_are_refused_with_numbers():
    sizing = sized(113, **AUTO, global_batch_size=1)
    with pytest.raises(UserError, match=r"even with 1 x 8192 tokens and --recompute full a step is") as error:
        advice.refuse_misfit(sizing)
    assert error.value.exit_code == EXIT_BAD_SETTING and error.value.flags == {"batch_size", "recompute"}
    excess = f"{sizing.needed / 1e9:.1f} of 113.0 GB, {sizing.needed / 1e9 - 111:.1f} GB too much;"
    assert excess in str(error.value)
    assert followed(sizing, str(error.value)).fits


def test_given_sizes_are_warned_about_not_refused():
    clearly, slightly = sized(130, batch_size=8), sized(140, batch_size=1)
    advice.refuse_misfit(clearly)
    assert not clearly.fits and not slightly.fits and advice.warning(slightly) is None
    assert "will probably run out of memory; use --global_batch_size 8" in advice.warning(clearly)


def test_nothing_fits():
    assert advice.way_out(sized(4, 70.0, "ddp", 8, **AUTO)).startswith("use more GPUs")


# 10 bytes a parameter for each copy of the state: GB per node, of 100.
@pytest.mark.parametrize(
    ("where", "settings", "needed"),
    [
        ((13.0, "single"), {}, 130),
        ((13.0, "single"), {"moment_dtype": "fp8", "offload_optimizer": True}, 52),
        ((40.0, "fsdp_full", 8), {}, 400),
        ((40.0, "fsdp_grad", 32), {}, 100),
        ((4.0, "ddp", 16), {"moment_dtype": "fp8"}, 129),
        ((8.0, "ds_zero3_offload", 16), {}, 128),
        ((4.0, "ds_zero3_offload", 8, 8), {"save_checkpoints": False}, 80),
    ],
)
def test_a_host_too_small_for_offloaded_state_is_refused(where, settings, needed, monkeypatch):
    monkeypatch.setattr(advice, "host_capacity", lambda setup: 100e9)
    deepspeed = where[1].startswith("ds")
    optimizer = replace(ZERO if deepspeed else OFFLOADED)
    if settings.get("moment_dtype"):
        optimizer = replace(FP8_MOMENTS, offload=True)
    flags = {"sharding_mode": where[1]} if len(where) > 2 else {}
    flags |= {} if deepspeed else {"offload_optimizer": True}
    setup = setup_of(*where[:3], optimizer=optimizer, shape=False, **flags | settings)
    assert memory.offloaded_bytes(setup) / 1e9 == pytest.approx(needed, abs=0.5)
    sizing = unpredicted_sizes(setup, 5e9 if deepspeed else 1e12)
    if needed <= 100:
        return advice.refuse_small_host(sizing)
    with pytest.raises(UserError) as error:
        advice.refuse_small_host(sizing)
    assert error.value.flags == {"sharding_mode" if deepspeed else "offload_optimizer"}


def test_a_host_too_small_for_activations_is_refused(monkeypatch):
    """Llama 3.1 8B: inputs and attention outputs of 2**30 bytes each in 32 layers."""
    settings = {"recompute": "layer", "offload_activations": True, "max_seq_length": 131_072, "batch_size": 1}
    sizing = sized(1000, **settings)
    monkeypatch.setattr(advice, "host_capacity", lambda setup: 64 * 2**30)
    advice.refuse_small_host(sizing)
    monkeypatch.setattr(advice, "host_capacity", lambda setup: 64 * 2**30 - 1)
    with pytest.raises(UserError, match=r"needs 69 GB .* has 69 GB beside") as error:
        advice.refuse_small_host(sizing)
    assert error.value.flags == {"offload_activations"}
    padded = config_from_dict(sizing.chosen.cfg.to_dict() | {"packing": False})
    assert memory.offloaded_bytes(replace(sizing.chosen, cfg=padded)) == 2 * 64 * 2**30


def test_offload_is_no_way_out_on_a_small_host(monkeypatch):
    sizing = sized(60, **AUTO)
    monkeypatch.setattr(advice, "host_capacity", lambda setup: 10**9)
    assert "offload" not in advice.way_out(sizing)
