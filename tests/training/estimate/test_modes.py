"""The sharding mode that `auto` chooses."""

from dataclasses import replace

import pytest
from fp8_suite.training.estimate.modes import choose_mode

from tests.training.estimate.setups import FUSED, OFFLOADED, setup_of

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
    ("billions", "free", "mode"),
    # 28 GB of shards, 16 accumulated, 16 gathered; 56 GB whole and 8 more for gradients in FP32.
    [(4.0, 105e9, "fsdp_grad"), (4.0, 95e9, "fsdp_full"), (1.0, 27e9, "ddp"), (1.0, 26e9, "fsdp_grad")],
)
def test_sums_of_whole_gradients_count(billions, free, mode):
    assert chosen(billions, free, gpus=2, gradient_accumulation_steps=2)[0] == mode


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


@pytest.mark.parametrize(
    ("billions", "in_fp8", "mode"), [(8.0, False, "ddp"), (70.0, False, "fsdp_full"), (70.0, True, "ddp")]
)
def test_frozen_weights_are_sharded_only_if_they_do_not_fit(billions, in_fp8, mode):
    optimizer = replace(FUSED, holds_fp8_weights=in_fp8)
    request = setup_of(billions, "ddp", 8, lora_rank=16, batch_size=1, optimizer=optimizer)
    assert choose_mode(request, FREE)[0] == mode


def test_without_a_gpu_it_is_ddp():
    assert chosen(70.0, None, gpus=8)[0] == "ddp"


def test_an_offloaded_optimizer_leaves_weights_and_gradients():
    mode, reason = chosen(70.0, gpus=8, optimizer=OFFLOADED)
    assert mode == "fsdp_full" and "weights and gradients need 280.0 GB" in reason


def test_sequences_shared_across_nodes_rule_out_hsdp():
    setup = setup_of(20.0, "ddp", 16, shape=False, context_parallel_size=16)
    assert choose_mode(setup, FREE)[0] == "fsdp_full"


@pytest.mark.parametrize(
    ("sizes", "gpus", "mode"),
    [
        ({"tensor_parallel_size": 2}, 2, "ddp"),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 4, "ddp"),
        ({"tensor_parallel_size": 2}, 4, "fsdp_full"),  # two ranks hold the same half
        ({"tensor_parallel_size": 2, "context_parallel_size": 2}, 4, "fsdp_full"),
    ],
)
def test_ranks_with_different_parts_of_a_model_shard_nothing(sizes, gpus, mode):
    assert choose_mode(setup_of(70.0, "ddp", gpus, batch_size=1, **sizes), FREE)[0] == mode


@pytest.mark.parametrize(("free", "mode"), [(110e9, "ddp"), (90e9, "fsdp_full")])
def test_fsdp_over_one_rank_is_for_parts_that_do_not_fit_without(free, mode):  # 97 and 83 GB
    settings = {"batch_size": 2, "max_seq_length": 8192, "mixed_precision": "fp8", "moment_dtype": "fp8"}
    request = setup_of(8.0, "ddp", 2, tensor_parallel_size=2, **settings)
    assert choose_mode(request, free)[0] == mode
