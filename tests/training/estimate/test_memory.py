"""Terms of the memory model by hand that recorded runs (`tests/benchmarks/test_plan.py`) do not show."""

import json
from types import SimpleNamespace

import pytest
from fp8_suite.core.errors import UserError
from fp8_suite.core.packages import ROOT
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.estimate import memory
from fp8_suite.training.estimate.activations import layer_activations
from fp8_suite.training.estimate.transfers import exchange

from tests.training.estimate.setups import FUSED, ZERO, setup_of


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


def test_hsdp_over_one_group_sends_as_much_as_fsdp():
    one_group = {"sharding_mode": "hsdp", "hsdp_shard_size": 8}
    assert (
        exchange(setup_of(8.0, "hsdp", 8, **one_group)).within
        == exchange(setup_of(8.0, "fsdp_full", 8)).within
    )


@pytest.mark.parametrize("mode", ["ds_zero1", "ds_zero2"])
def test_deepspeed_allocates_its_buckets_when_backward_begins(mode):
    parts = memory.start_of_backward(setup_of(8.0, mode, 8, optimizer=ZERO))
    assert parts["gathered, communication"] == memory.ZERO_BUCKETS


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


def test_constants_are_those_of_deepspeeds_settings():
    zero3 = SimpleNamespace(**json.loads((ROOT / "ds_configs/zero3.json").read_text())["zero_optimization"])
    assert 2 * zero3.stage3_max_live_parameters == memory.ZERO_LIVE
    assert 2 * 2 * zero3.reduce_bucket_size == memory.ZERO_BUCKETS


@pytest.mark.parametrize(
    ("flags", "widths"),
    [
        ({}, 2 * 4096 + 7 * 16),  # two norms' outputs and seven products; attention keeps its own output
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
