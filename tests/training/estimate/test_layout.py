"""Sizes of parallel layouts, and memory that recorded runs (`tests/benchmarks/test_plan.py`) do not show."""

import pytest
from fp8_suite.core.errors import UserError
from fp8_suite.training.estimate.activations import backward_buffers
from fp8_suite.training.estimate.layout import Layout, check_layout, stage_layers
from fp8_suite.training.estimate.setup import TrainingSetup, rank_setups

from tests.training.estimate.setups import SHAPES, setup_of


def split(layout: Layout, gpus: int = 64, mode: str = "fsdp_grad", **settings) -> TrainingSetup:
    defaults = {"mixed_precision": "bf16", "batch_size": 1, "gradient_accumulation_steps": 16}
    return setup_of(70.0, mode, gpus, **defaults | layout.flags | settings)


def test_pipeline_ranks_share_the_layers_and_the_first_and_last_have_fewer():
    layers = [stage_layers(126, 16, stage) for stage in range(16)]
    assert layers == [7, *[8] * 14, 7]
    assert [stage_layers(80, 8, stage) for stage in range(8)] == [10] * 8
    assert sum(stage_layers(9, 8, stage) for stage in range(8)) == 9


def test_recomputed_layers_are_spread_over_the_stages():
    setup = split(Layout(pp=8), recompute="layer:40")
    assert [rank.recompute for rank in rank_setups(setup)] == [["layer"] * 5 + ["none"] * 5] * 3


def test_gathered_keys_need_memory_in_backward():
    few, many = (split(Layout(cp=cp), max_seq_length=2**20, cp_comm_type="all_gather") for cp in (2, 64))
    assert backward_buffers(few) == 2 * 2**19 * (3 * 28_672 + 2 * 8192)
    assert backward_buffers(many) == 2 * 2**20 * 4 * 1024


@pytest.mark.parametrize(
    ("layout", "flag"),
    [
        (Layout(cp=3), "context_parallel_size"),
        (Layout(pp=128), "pipeline_parallel_size"),
        (Layout(pp=8, virtual=3), "virtual_stages"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(layout, flag):
    check_layout(Layout(cp=2, tp=8, pp=8, virtual=5), SHAPES[70.0], 8, 8192)
    with pytest.raises(UserError) as error:
        check_layout(layout, SHAPES[70.0], 8, 8192)
    assert error.value.flags == {flag}
