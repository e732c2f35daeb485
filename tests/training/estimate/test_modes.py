"""The sharding mode that `auto` chooses."""

from dataclasses import replace

import pytest
from fp8_suite.training.estimate.modes import choose_mode

from tests.training.estimate.setups import FUSED, OFFLOADED, SHAPES, setup_of

FREE = 100e9  # 60 GB of these are for the state


def chosen(billions, free=FREE, **where):
    return choose_mode(setup_of(billions, "ddp", shape=False, **where), free)


@pytest.mark.parametrize(
    ("billions", "gpus", "gpus_per_node", "mode"),
    [
        (0.5, 2, 2, "ddp"),  # 7 GB
        (1.2, 8, 8, "ddp"),  # 17 GB
        (4.0, 2, 2, "fsdp_grad"),  # 56 GB, which fit whole; gathered 16, a shard 28
        (8.0, 8, 8, "fsdp_grad"),  # 112 GB; gathered weights and gradients 32, a shard 14
        (20.0, 16, 8, "hsdp"),  # 280 GB; gathered 80, over the ranks of a node 35
        (20.0, 8, 8, "fsdp_full"),  # there is one node
        (20.0, 8, 1, "fsdp_full"),  # a node is one GPU
        (70.0, 32, 8, "fsdp_full"),  # 980 GB; over a node 122.5, over all ranks 31
        (70.0, 8, 8, "fsdp_full"),  # too large for any mode
        (70.0, 1, 1, "single"),
    ],
)
def test_the_fastest_mode_that_fits(billions, gpus, gpus_per_node, mode):
    choice, reason = chosen(billions, gpus=gpus, gpus_per_node=gpus_per_node)
    assert choice == mode
    assert gpus == 1 or (f"need {billions * 14:.1f} GB" in reason and "has room for 60.0 GB" in reason)


@pytest.mark.parametrize(
    ("length", "mode"),
    # 65 GB; 90 GB, or 77 in fsdp_full; 131,072 tokens fit in no mode.
    [(8192, "fsdp_grad"), (14_336, "fsdp_full"), (131_072, "fsdp_grad")],
)
def test_activations_need_more_shards_if_they_are_predicted(length, mode):
    request = setup_of(8.0, "ddp", 8, mixed_precision="fp8", batch_size=1, max_seq_length=length)
    choice, reason = choose_mode(request, 85.1e9)
    assert choice == mode and ("in fsdp_full a step is predicted to need" in reason) == (mode == "fsdp_full")
    assert choose_mode(request, 85.1e9, predicted=False)[0] == "fsdp_grad"


def test_an_offloaded_optimizer_leaves_weights_and_gradients():
    mode, reason = chosen(70.0, gpus=8, optimizer=OFFLOADED)
    assert mode == "fsdp_full" and "weights and gradients need 280.0 GB" in reason


TWICE, LORA = {"gradient_accumulation_steps": 2}, {"lora_rank": 16}
TP = {"tensor_parallel_size": 2}
TP_IN_FP8 = TP | {"batch_size": 2, "mixed_precision": "fp8", "moment_dtype": "fp8"}


@pytest.mark.parametrize(
    ("billions", "gpus", "free", "settings", "mode"),
    [
        (70.0, 8, None, {}, "ddp"),  # no GPU
        # Sums of gradients: 28 GB of shards, 16 accumulated, 16 gathered; 56 GB whole, 8 more in FP32.
        (4.0, 2, 105e9, TWICE, "fsdp_grad"),
        (4.0, 2, 95e9, TWICE, "fsdp_full"),
        (1.0, 2, 27e9, TWICE, "ddp"),
        (1.0, 2, 26e9, TWICE, "fsdp_grad"),
        # Frozen weights are sharded only if they do not fit.
        (8.0, 8, FREE, LORA, "ddp"),
        (70.0, 8, FREE, LORA, "fsdp_full"),
        (70.0, 8, FREE, LORA | {"optimizer": replace(FUSED, holds_fp8_weights=True)}, "ddp"),
        # Sequences shared across nodes rule out HSDP; ranks with different parts of a model shard nothing.
        (20.0, 16, FREE, {"context_parallel_size": 16}, "fsdp_full"),
        (70.0, 2, FREE, TP, "ddp"),
        (70.0, 4, FREE, TP | {"pipeline_parallel_size": 2}, "ddp"),
        (70.0, 4, FREE, TP, "fsdp_full"),  # two ranks hold the same half
        (70.0, 4, FREE, TP | {"context_parallel_size": 2}, "fsdp_full"),
        # FSDP over one rank is for parts that do not fit without: 97 and 83 GB.
        (8.0, 2, 110e9, TP_IN_FP8, "ddp"),
        (8.0, 2, 90e9, TP_IN_FP8, "fsdp_full"),
    ],
)
def test_the_fastest_mode_with_other_settings(billions, gpus, free, settings, mode):
    settings = {"batch_size": 1, "shape": billions in SHAPES} | settings
    assert choose_mode(setup_of(billions, "ddp", gpus, **settings), free)[0] == mode
