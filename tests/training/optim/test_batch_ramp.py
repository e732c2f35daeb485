"""--batch_ramp: how it is read, which step has which batch, and what a run refuses."""

import json

import pytest
from fp8_suite.core.errors import EXIT_BAD_SETTING, UserError
from fp8_suite.training.config import config_from_dict, parse_config
from fp8_suite.training.estimate.memory import accumulated_gradients
from fp8_suite.training.estimate.sizes import choose_sizes, with_sizes
from fp8_suite.training.optim.batch_ramp import BatchSchedule
from fp8_suite.training.optim.settings import parse_batch_ramp

from tests.training.estimate.setups import setup_of

LLAMA_3 = "4Mi:0 8Mi:252M 16Mi:2.87T"


def schedule(ramp: str, ranks: int = 1, **settings) -> BatchSchedule:
    cfg = config_from_dict({"batch_size": 2, "max_seq_length": 256, "batch_ramp": ramp} | settings)
    return BatchSchedule.of(with_sizes(cfg, ranks), ranks)


def test_units():
    assert parse_batch_ramp(LLAMA_3) == ((2**22, 0), (2**23, 252 * 10**6), (2**24, 287 * 10**10))
    assert parse_batch_ramp("1.5K:0 2048:3B") == ((1500, 0), (2048, 3 * 10**9))


def test_a_phase_begins_with_the_first_step_that_has_seen_its_tokens():
    batches = schedule(LLAMA_3, ranks=128, batch_size=4, max_seq_length=8192)
    starts = [phase.first_step for phase in batches.phases]
    assert starts[:2] == [0, 61], "60 steps of 4Mi are 251.7 million tokens"
    assert [batches.micro_batches(step) for step in (0, 60, 61, starts[2] - 1, starts[2])] == [1, 1, 2, 2, 4]
    assert batches.position(starts[2] - 1) < 287 * 10**10 <= batches.position(starts[2])
    assert batches.position(62) == 61 * 2**22 + 2**23
    for step in (0, 60, 61, 62, 10**6):  # does not depend on the ranks
        assert schedule(LLAMA_3, ranks=32, max_seq_length=8192).position(step) == batches.position(step)


def test_without_a_ramp_positions_are_steps():
    cfg = config_from_dict({"gradient_accumulation_steps": 3})
    batches = BatchSchedule.of(cfg, 2)
    assert [batches.position(step) for step in (0, 7)] == [0, 7] and batches.micro_batches(5) == 3
    assert batches.steps_after(4, 10, 5) == 4 + 5 * 4 and batches.metrics(3) == {}


@pytest.mark.parametrize("per_epoch", [1, 2, 5, 7, 100])
@pytest.mark.parametrize("start", [0, 3, 4, 9])
def test_steps_of_epochs(per_epoch, start):
    """The last step of an epoch takes what is left, and the next epoch begins with a full one."""
    batches, step = schedule("512:0 1Ki:2Ki 2Ki:6Ki"), start
    for _ in range(6):
        left = per_epoch
        while left > 0:
            left, step = left - (1, 2, 4)[(step >= 4) + (step >= 8)], step + 1
    assert batches.steps_after(start, per_epoch, 6) == step


@pytest.mark.parametrize(
    "ramp",
    ["", "4Mi", "4Q:0", "1.5:0", "i:0", "-512:0", "0:0", "512:1Ki", "1Ki:0 512:2Ki", "512:0 1Ki:0", "5:0:6"],
)
def test_a_ramp_that_cannot_be_read_or_does_not_grow_is_refused(ramp):
    with pytest.raises(UserError) as error:
        config_from_dict({"batch_ramp": ramp})
    assert error.value.flags == {"batch_ramp"} and error.value.exit_code == EXIT_BAD_SETTING


@pytest.mark.parametrize(
    ("ramp", "ranks"), [("4M:0 8M:252M 16M:2.87T", 16), ("4Mi:0 9.1Mi:252M", 64), ("8Ki:0 20000:1M", 1)]
)
def test_tokens_that_do_not_divide_are_refused(ramp, ranks):
    settings = {"batch_size": 8, "max_seq_length": 1024} if ranks == 1 else {"max_seq_length": 8192}
    with pytest.raises(UserError) as error:
        schedule(ramp, ranks, **settings)
    assert error.value.flags == {"batch_ramp"}


def test_on_more_ranks_a_smaller_micro_batch_keeps_the_ramp():
    with pytest.raises(UserError, match="use --batch_size 4") as error:
        schedule(LLAMA_3, 128, max_seq_length=8192, batch_size=8)
    assert error.value.flags == {"batch_ramp"}


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({"batch_ramp": LLAMA_3, "global_batch_size": 8}, {"batch_ramp", "global_batch_size"}),
        ({"batch_ramp": "512:0", "gradient_accumulation_steps": 2}, {"gradient_accumulation_steps"}),
        ({"lr_scheduler": "linear", "decay_ratio": 0.3}, {"decay_ratio", "lr_scheduler"}),
        ({"lr_scheduler": "wsd", "decay_ratio": 0.9, "warmup_ratio": 0.2}, {"decay_ratio", "warmup_ratio"}),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, flags):
    with pytest.raises(UserError) as error:
        with_sizes(config_from_dict({"batch_size": 1, "max_seq_length": 512} | settings), 1)
    assert error.value.flags == flags


def test_auto_divides_all_phases_and_fits_the_largest():
    ramp = {"batch_ramp": "6Ki:0 24Ki:1M", "batch_size": "auto", "max_seq_length": 1024}
    chosen = choose_sizes(setup_of(8.0, "single", 1, **ramp), 150e9).chosen
    batch, accumulation = chosen.cfg.optim.batch_size, chosen.accumulation
    assert 6 % batch == 0 and batch * accumulation == 24
    alone = {"batch_size": 6, "batch_ramp": None, "max_seq_length": 1024}
    assert accumulated_gradients(setup_of(8.0, "single", 1, **alone)) == 0 < accumulated_gradients(chosen)


def test_it_is_text_in_files_and_a_runs_settings_resume_on_other_ranks(tmp_path):
    def read(text: str, name: str):
        (tmp_path / name).write_text(text)
        return parse_config(["--config", str(tmp_path / name)], prog="p", description="d")

    cfg = with_sizes(read("batch_ramp: 16Ki:0 32Ki:1M\nlr_scheduler: wsd\n", "run.yaml"), 1)
    assert cfg.optim.gradient_accumulation_steps == 4
    again = with_sizes(read(json.dumps(cfg.to_dict()), "settings.json"), 2)
    assert again.optim.gradient_accumulation_steps == 2
