"""Terms of the memory model, by hand."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fp8_suite.core.errors import UserError
from fp8_suite.core.packages import ROOT
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.estimate import memory
from fp8_suite.training.estimate.activations import layer_activations
from fp8_suite.training.estimate.transfers import exchange

from tests.training.estimate.setups import FUSED, OFFLOADED, ZERO, setup_of


@pytest.mark.parametrize(("offloads", "gradients"), [(False, 1.05), (True, 14.95)])
def test_with_offloaded_activations_memory_peaks_at_the_end_of_backward(offloads, gradients):
    """Llama 3.1 8B: BF16 gradients of the head, 1.05 GB, and of all layers, 13.9 GB."""
    flags = {"recompute": "full", "offload_activations": offloads, "use_te": True, "max_seq_length": 262144}
    parts = memory.peak(setup_of(batch_size=1, **flags))
    total = parts["gradients"] + parts["logits and head gradient"]
    assert total / 1e9 == pytest.approx(gradients, abs=0.05)


# 4 GB per rank of the node's 100 GB, or a quarter.
@pytest.mark.parametrize(("gpus", "per_node", "capacity"), [(1, 8, 96), (16, 4, 84), (8, 8, 75)])
def test_offloading_leaves_host_memory_to_the_ranks_of_a_node(gpus, per_node, capacity, monkeypatch):
    monkeypatch.setattr(memory, "host_memory", lambda: 100 * 10**9)
    assert memory.host_capacity(setup_of(gpus=gpus, gpus_per_node=per_node)) == capacity * 1e9


@pytest.mark.parametrize(("gpus", "bytes_per_gradient"), [(2, 8.0), (8, 3.5), (64, 3.5)])
def test_an_exchange_in_fp8_needs_memory_beside_the_gradients(gpus, bytes_per_gradient):
    setups = [setup_of(8.0, "ddp", gpus, grad_reduce_dtype=dtype) for dtype in ("bf16", "fp8")]
    bf16, fp8 = (memory.start_of_backward(setup)["gathered, communication"] for setup in setups)
    assert fp8 - bf16 == bytes_per_gradient * setups[0].model.head_weights


@pytest.mark.parametrize(
    ("micro_batches", "fsdp", "tied", "kept"),
    [(1, False, False, 1), (8, False, False, 0), (8, False, True, 1), (8, True, False, 1)],
)
def test_the_heads_gradient_is_kept_unless_its_sum_is_fused(micro_batches, fsdp, tied, kept):
    """A tied weight's sum is complete with the embedding's gradient, the last one of backward."""
    mode, gpus = ("fsdp_full", 8) if fsdp else ("single", 1)
    setup = setup_of(mode=mode, gpus=gpus, gradient_accumulation_steps=micro_batches, use_te=True)
    setup = replace(setup, model=replace(setup.model, tied=tied))
    head = memory.start_of_backward(setup)["logits and head gradient"]
    assert head == kept * 2 * setup.model.head_weights


HSDP = {"sharding_mode": "hsdp", "hsdp_shard_size": 4}


@pytest.mark.parametrize(
    ("mode", "per_node", "settings", "bytes_per_gradient"),
    [("fsdp_full", 8, {}, 2 + 2 / 8), ("fsdp_full", 4, {}, 4 + 2 / 8), ("hsdp", 8, HSDP, 4 + 2 / 4)],
)
def test_a_reduction_has_a_send_buffer_and_a_shard_after_its_activations(
    mode, per_node, settings, bytes_per_gradient
):
    """Ranks of a node exchange BF16. Across nodes, and in hsdp, NCCL sums in FP32."""
    flags = {"recompute": "full", "max_seq_length": 1024, "use_te": True} | settings
    setup = setup_of(8.0, mode, 8, gpus_per_node=per_node, **flags)
    model = setup.model
    added = (memory.start_of_backward(setup), memory.at_loss(setup))
    buffers = added[0]["gathered, communication"] - added[1]["gathered, communication"]
    kept = 2 * setup.tokens * model.shape.hidden_size
    assert buffers == 2 * model.block_weights + bytes_per_gradient * model.block_weights - kept


def test_hsdp_over_one_group_sends_as_much_as_fsdp():
    one_group = {"sharding_mode": "hsdp", "hsdp_shard_size": 8}
    assert (
        exchange(setup_of(8.0, "hsdp", 8, **one_group)).within
        == exchange(setup_of(8.0, "fsdp_full", 8)).within
    )


def test_inputs_of_hsdps_all_reduce_live_until_backward_ends():
    setups = (setup_of(8.0, "hsdp", 8, grad_reduce_dtype=dtype, **HSDP) for dtype in ("fp32", "bf16"))
    fp32, bf16 = (memory.end_of_backward(setup)["gathered, communication"] for setup in setups)
    model = setup_of(8.0).model
    others = model.parameters - model.root_weights - model.block_weights
    assert fp32 - bf16 == 4 / 4 * others


@pytest.mark.parametrize("mode", ["ds_zero1", "ds_zero2"])
def test_deepspeed_allocates_its_buckets_when_backward_begins(mode):
    parts = memory.start_of_backward(setup_of(8.0, mode, 8, optimizer=ZERO))
    assert parts["gathered, communication"] == memory.ZERO_BUCKETS


@pytest.mark.parametrize(("dtype", "received"), [("fp32", 2), ("bf16", 2 / 8)])
def test_the_roots_gradients_are_received_whole_or_as_a_shard(dtype, received):
    setup = setup_of(8.0, "fsdp_full", 8, grad_reduce_dtype=dtype)
    buffers = memory.after_backward(setup)["gathered, communication"]
    assert buffers == (2 + 4 + received) * setup.model.root_weights


def test_deepspeed_keeps_gradients_in_fp32_on_the_host_if_several_add_up():
    setup = setup_of(8.0, "ds_zero3_offload", 8, gradient_accumulation_steps=4)
    assert memory.offloaded_bytes(setup) == (22 + 12) * 8e9  # 12 during a save


@pytest.mark.parametrize(("setting", "size"), [(None, 4), (2, 2), (8, 8), (1, 1), (3, None), (16, None)])
def test_hsdp_shards_over_a_node_or_a_divisor_of_the_ranks(setting, size):
    cfg = config_from_dict({"sharding_mode": "hsdp", "hsdp_shard_size": setting})
    if size:
        assert cfg.sharding.shard_size(8, 4) == size
    else:
        with pytest.raises(UserError, match=f"--hsdp_shard_size {setting}: does not divide 8 ranks"):
            cfg.sharding.shard_size(8, 4)


# Bytes a parameter of weights, masters and moments, as in docs/multi_gpu.md; DeepSpeed's masters are FP32.
@pytest.mark.parametrize(
    ("mode", "optimizer", "held"),
    [
        ("ddp", FUSED, 12),
        ("fsdp_full", FUSED, 12 / 4),
        ("fsdp_grad", FUSED, 12 / 4),
        ("hsdp", FUSED, 12 / 2),
        ("ddp", OFFLOADED, 2),
        ("hsdp", OFFLOADED, 2 / 2),
        ("ds_zero1", ZERO, 2 + 12 / 4),
        ("ds_zero2", ZERO, 2 + 12 / 4),
        ("ds_zero3", ZERO, 14 / 4),
        ("ds_zero3_offload", ZERO, 0),
    ],
)
def test_state_by_mode(mode, optimizer, held):
    setup = setup_of(8.0, mode, 4, gpus_per_node=2, optimizer=optimizer)
    assert sum(memory.state(setup).values()) == held * 8e9


def test_constants_are_those_of_deepspeeds_settings():
    zero3 = SimpleNamespace(**json.loads((ROOT / "ds_configs/zero3.json").read_text())["zero_optimization"])
    assert 2 * zero3.stage3_max_live_parameters == memory.ZERO_LIVE
    assert 2 * 2 * zero3.reduce_bucket_size == memory.ZERO_BUCKETS


# Llama 3.1 8B, rank 16: seven adapters a layer with 38,912 inputs and 43,008 outputs in all.
ADAPTERS = 16 * 32 * (38_912 + 43_008)


def test_adapters_alone_have_masters_moments_and_gradients():
    setup = setup_of(8.0, "ddp", 4, batch_size=1, lora_rank=16)
    assert setup.model.adapters == ADAPTERS == 41_943_040
    state = memory.state(setup)
    assert state == {
        "weights": 2 * (8e9 + ADAPTERS),
        "master weights": 2 * ADAPTERS,
        "moments": 8 * ADAPTERS,
    }
    assert memory.resident_state(setup) == sum(state.values()) + 2 * ADAPTERS
    assert memory.peak(setup)["gradients"] < 5 * ADAPTERS
    assert memory.checkpoint_bytes(setup) == 12 * ADAPTERS
    assert memory.loss_peak(setup) < 3e9 < memory.loss_peak(setup_of(8.0, batch_size=1))
    sharded = replace(setup, mode="fsdp_full")
    assert sum(memory.state(sharded).values()) == sum(state.values()) / 4


def test_frozen_fp8_weights_are_the_only_copy():
    setup = setup_of(8.0, optimizer=replace(FUSED, holds_fp8_weights=True), lora_rank=16)
    in_bf16 = 8_000_000_000 - setup.model.gemm_weights + ADAPTERS
    assert memory.state(setup)["weights"] == pytest.approx(2 * in_bf16 + setup.model.gemm_weights)


@pytest.mark.parametrize(
    ("flags", "widths"),
    [
        # Two norms' outputs and seven products; attention keeps its own output.
        ({}, 2 * 4096 + 7 * 16),
        ({"mixed_precision": "bf16"}, 2 * 4096 + 7 * 16),
        ({"use_te": False}, 2 * 4096 + 14_336 + 7 * 16),
        ({"lora_targets": "q_proj,v_proj"}, 4096 + 2 * 16),
        ({"lora_targets": "layers.0.mlp.down_proj"}, 16 / 32),
        ({"lora_dropout": 0.1}, 2 * 2 * 4096 + 2 * 14_336 + 2 * 4096 + 7 * 16),
    ],
)
def test_a_layer_keeps_the_inputs_of_its_adapters(flags, widths):
    setup = setup_of(8.0, **{"batch_size": 1, "mixed_precision": "fp8", "lora_rank": 16} | flags)
    others = 2 * 4096 + 2 * 4096 + 2 * 1024 + 2 * 14_336  # input, residual, q, attention, k, v, gate, up
    assert layer_activations(setup) == 8192 * 2 * (others + widths)


IN_FP8 = {"fp8_scenario": "current", "fp8_all_gather": True, "sharding_mode": "fsdp_full"}


@pytest.mark.parametrize(
    ("mode", "optimizer", "settings", "fuses"),
    [
        ("ds_zero2", ZERO, {}, False),
        ("ddp", FUSED, {"grad_reduce_dtype": "bf16"}, False),  # DDP's buckets are the sums
        ("ddp", FUSED, {"grad_reduce_dtype": "bf16", "pipeline_parallel_size": 2}, True),  # has no buckets
        ("fsdp_full", FUSED, {"grad_reduce_dtype": "bf16"}, True),
        ("fsdp_full", FUSED, IN_FP8, False),
        ("single", FUSED, {"use_te": False}, False),
    ],
)
def test_gemms_add_to_the_sums_unless_these_are_elsewhere(mode, optimizer, settings, fuses):
    settings = {"gradient_accumulation_steps": 8, "mixed_precision": "fp8"} | settings
    assert setup_of(mode=mode, gpus=8, optimizer=optimizer, **settings).fuses_gradient_sums == fuses
