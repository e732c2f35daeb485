"""The memory model: what `auto` chooses, what is refused, and the terms of every sharding mode."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fp8_suite.core.errors import UserError
from fp8_suite.core.packages import ROOT
from fp8_suite.te_models.shape import ModelShape
from fp8_suite.te_models.spec import find_model
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.estimate import choose, memory
from fp8_suite.training.estimate.choose import choose_mode
from fp8_suite.training.estimate.memory import host_state
from fp8_suite.training.estimate.setup import ModelSize, TrainingSetup
from fp8_suite.training.optim.optimizer import OptimizerSpec

# 14 bytes a parameter: BF16 weights and gradients, FP32 masters' 2 more bytes, two FP32 moments.
FUSED = OptimizerSpec("fused_adamw", torch.bfloat16, True, ("fp32", "fp32"))
FP8 = replace(FUSED, moment_dtypes=("fp8", "fp8"))
OFFLOADED = replace(FUSED, offload=True)
OF_FP8_SHARDS = replace(FUSED, holds_fp8_weights=True)
OF_FP8_WEIGHTS = replace(OFFLOADED, holds_fp8_weights=True)
GATHERED_IN_FP8 = {"fp8_all_gather": True, "sharding_mode": "fsdp_full", "fp8_scenario": "current"}
GPU = int(100e9)


def plan_of(billions, mode="ddp", *, gpus=8, gpus_per_node=8, optimizer=FUSED, **settings):
    cfg = config_from_dict({"model_name": "m"} | settings)
    return TrainingSetup(cfg, ModelSize(int(billions * 1e9)), optimizer, mode, gpus, gpus_per_node)


SHAPE_8B = ModelShape(4096, 32, 32, 8, 128, 14_336, 128_256)
SINGLE_8B = plan_of(8.03, "single", gpus=1, use_te=True, mixed_precision="fp8")
SINGLE_8B = replace(SINGLE_8B, model=replace(SINGLE_8B.model, shape=SHAPE_8B))


def with_settings(plan, optimizer, **settings):
    return replace(plan, cfg=config_from_dict(plan.cfg.to_dict() | settings), optimizer=optimizer)


def host(monkeypatch, room):
    monkeypatch.setattr(memory, "host_room", lambda plan: room)


# 60 of the 100 GB are for the state.
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
        (40.0, 8, 8, "fsdp_full"),  # 560 GB; over all ranks 70, within the last room of 75
        (70.0, 8, 8, "fsdp_full"),  # refused then, with the way out
        (0.5, 1, 1, "single"),
        (6.4, 1, 1, "single"),  # 90 of 100 GB, where sharding cannot help
        (6.5, 1, 1, "single"),  # as above
    ],
)
def test_auto_chooses_the_fastest_mode_that_fits(billions, gpus, gpus_per_node, mode):
    found, why = choose_mode(plan_of(billions, gpus=gpus, gpus_per_node=gpus_per_node), GPU)
    assert found == mode
    assert mode == "single" or f"need {billions * 14:.1f} GB, a GPU has room for 60.0 GB" in why


@pytest.mark.parametrize(("billions", "gpus", "mode"), [(400.0, 8, "fsdp_full"), (80.0, 1, "single")])
def test_auto_keeps_an_offloaded_optimizer(billions, gpus, mode):
    plan = plan_of(billions, gpus=gpus, optimizer=OFFLOADED, offload_optimizer=True)
    found, why = choose_mode(plan, GPU)
    assert found == mode and "they do not fit into 75.0 GB" in why


@pytest.mark.parametrize(
    ("billions", "gpus", "gpu", "mode"),
    # 28 GB of shards, 16 accumulated, 16 gathered; 56 GB whole and 8 more for gradients in FP32.
    [
        (4.0, 2, 105e9, "fsdp_grad"),
        (4.0, 2, 95e9, "fsdp_full"),
        (1.0, 2, 27e9, "ddp"),
        (1.0, 2, 26e9, "fsdp_grad"),
    ],
)
def test_auto_counts_whole_gradients_that_fsdp_accumulates(billions, gpus, gpu, mode):
    found, why = choose_mode(plan_of(billions, gpus=gpus, gradient_accumulation_steps=2), int(gpu))
    assert found == mode and f"accumulated gradients need {4 * billions:.1f} GB" in why


@pytest.mark.parametrize(
    ("length", "mode"),
    # 65 GB; 90 GB, or 77 in fsdp_full; 131,072 tokens fit in no mode.
    [(8192, "fsdp_grad"), (14_336, "fsdp_full"), (131_072, "fsdp_grad")],
)
def test_auto_shards_more_where_activations_need_it(length, mode):
    flags = {"use_te": True, "mixed_precision": "fp8", "batch_size": 1, "max_seq_length": length}
    plan = plan_of(8.03, **flags)
    shape = ModelShape(4096, 32, 32, 8, 128, 14_336, 128_256)
    found, why = choose_mode(replace(plan, model=replace(plan.model, shape=shape)), int(85.1e9))
    assert found == mode and ("in fsdp_full a step is predicted to need" in why) == (mode == "fsdp_full")


def test_auto_without_a_gpu_is_ddp():
    assert choose_mode(plan_of(70.0), None)[0] == "ddp"


def test_auto_counts_what_stays_on_the_gpu_of_an_offloaded_optimizer():
    """70 B in FP32 moments: 980 GB on 8 GPUs, of which 280 GB are weights and gradients."""
    found, why = choose_mode(plan_of(70.0, optimizer=OFFLOADED), GPU)
    assert found == "fsdp_full" and "weights and gradients need 280.0 GB" in why


ADAM = OptimizerSpec("zero_adamw", torch.bfloat16, True, ("fp32", "fp32"))


@pytest.mark.parametrize(
    ("plan", "gpu", "ways"),
    [
        (plan_of(8.0, "fsdp_full", gpus=2), 100e9, None),
        (
            plan_of(8.0, "single", gpus=1),
            100e9,
            "on one GPU: .* need 112.0 GB per GPU, which has 100.0 GB: "
            "--moment_dtype fp8 needs 64.2 GB, or --offload_optimizer needs 32.0 GB, "
            "or --sharding_mode fsdp_full needs 2 such GPUs$",
        ),
        (
            plan_of(70.0, "fsdp_full"),
            100e9,
            "--sharding_mode fsdp_full: .* need 122.5 GB .*fp8 needs 70.3 GB, or "
            "--offload_optimizer needs 35.0 GB, or --sharding_mode fsdp_full needs 14 such GPUs$",
        ),
        # Another optimizer cannot hold its state in BF16.
        (
            plan_of(8.0, "ds_zero1", gpus=1, optimizer=ADAM),
            80e9,
            "has 80.0 GB: --sharding_mode fsdp_full needs 3",
        ),
        (plan_of(8.0, "single", gpus=1, optimizer=OFFLOADED), 40e9, None),
        (
            plan_of(8.0, "single", gpus=1, optimizer=OFFLOADED),
            30e9,
            "on one GPU: weights and gradients of 8.0 B parameters need 32.0 GB .* has 30.0 GB: "
            "--sharding_mode fsdp_full needs 2",
        ),
        (
            replace(SINGLE_8B, optimizer=OFFLOADED),
            30e9,
            "has 30.0 GB: --offload_optimizer --fp8_weights needs 25.1 GB, or --sharding_mode fsdp_full "
            "needs 2 such GPUs$",
        ),
        (
            with_settings(SINGLE_8B, OF_FP8_WEIGHTS, fp8_weights=True, offload_optimizer=True),
            20e9,
            "has 20.0 GB: --sharding_mode fsdp_full without --fp8_weights needs 3 such GPUs$",
        ),
        (
            with_settings(replace(SINGLE_8B, mode="fsdp_full"), OF_FP8_SHARDS, **GATHERED_IN_FP8),
            100e9,
            "need 119.4 GB per GPU, which has 100.0 GB: --moment_dtype fp8 needs 71.5 GB, or --offload_opt",
        ),
        # Accumulated gradients reduce the room of a shard, here to 60 - 32 GB, or leave none.
        (plan_of(8.0, "single", gradient_accumulation_steps=2), 80e9, "fsdp_full needs 4 such GPUs"),
        (
            plan_of(8.0, "single", gradient_accumulation_steps=2),
            40e9,
            "has 40.0 GB: --offload_optimizer needs 32.0 GB$",
        ),
    ],
)
def test_a_gpu_that_cannot_hold_its_shard_is_refused_with_ways_that_fit(plan, gpu, ways, monkeypatch):
    host(monkeypatch, 1e12)
    if ways is None:
        return choose.refuse_small_gpu(plan, int(gpu))
    with pytest.raises(UserError, match=f"^--model_name m, .*{ways}"):
        choose.refuse_small_gpu(plan, int(gpu))


def test_an_offloaded_optimizer_is_no_way_out_on_a_small_host(monkeypatch):
    host(monkeypatch, 79e9)
    with pytest.raises(UserError) as error:
        choose.refuse_small_gpu(plan_of(8.0, "single", gpus=1), GPU)
    assert "--offload_optimizer" not in str(error.value)


# 10 bytes a parameter for each copy of the state: GB per node, and the ways out with 100 GB.
@pytest.mark.parametrize(
    ("plan", "needed", "ways"),
    [
        (plan_of(11.0, "single", gpus=1), 110, "--moment_dtype fp8 needs 44 GB, or drop"),
        (plan_of(40.0, "fsdp_full"), 400, "use more nodes, or drop it"),
        (plan_of(40.0, "fsdp_grad", gpus=32), 100, None),
        (
            plan_of(2.0, "ddp", gpus=16),
            160,
            "--moment_dtype fp8 needs 64 GB, or --sharding_mode fsdp_full needs 10 GB, or use",
        ),
        (
            plan_of(20.0, "hsdp", gpus=16),
            200,
            "--moment_dtype fp8 needs 81 GB, or --sharding_mode fsdp_full needs 100 GB",
        ),
        (plan_of(20.0, "hsdp", gpus=16, moment_dtype="fp8", optimizer=FP8), 81, None),
    ],
)
def test_a_host_too_small_for_the_optimizers_state_is_refused(plan, needed, ways, monkeypatch):
    host(monkeypatch, 100e9)
    plan = replace(plan, optimizer=replace(plan.optimizer, offload=True))
    assert memory.host_needs(plan) / 1e9 == pytest.approx(needed, abs=0.5)
    if ways is None:
        return choose.refuse_small_host(plan)
    text = f"^--offload_optimizer: .* need {needed} GB .* has 100 GB beside .*; {ways}"
    with pytest.raises(UserError, match=text):
        choose.refuse_small_host(plan)


def test_a_host_too_small_for_the_state_of_fp8_weights_is_refused(monkeypatch):
    host(monkeypatch, 85e9)
    whole = with_settings(SINGLE_8B, OF_FP8_WEIGHTS, fp8_weights=True, offload_optimizer=True)
    with pytest.raises(UserError, match=r"or dropping --fp8_weights needs 80 GB, or drop both$"):
        choose.refuse_small_host(whole)
    shards = with_settings(replace(SINGLE_8B, mode="fsdp_full"), OF_FP8_WEIGHTS, **GATHERED_IN_FP8)
    with pytest.raises(UserError, match=r"--moment_dtype fp8 needs 46 GB, or use more nodes, or drop it$"):
        choose.refuse_small_host(shards)


def test_a_host_too_small_for_activations_is_refused(monkeypatch):
    """Llama 3.1 8B: inputs and attention outputs of 2**30 bytes each in 32 layers."""
    flags = {"use_te": True, "offload_activations": True, "max_seq_length": 131072, "batch_size": 1}
    plan = plan_of(8.0, "single", gpus=1, recompute="layer", **flags)
    plan = replace(plan, model=replace(plan.model, shape=SHAPE_8B))
    host(monkeypatch, 64 * 2**30)
    choose.refuse_activations(plan)
    host(monkeypatch, 64 * 2**30 - 1)
    text = r"--offload_activations: micro-batches of 131,072 tokens need 69 GB .* has 69 GB beside.*; use"
    with pytest.raises(UserError, match=text):
        choose.refuse_activations(plan)
    padded = config_from_dict(plan.cfg.to_dict() | {"packing": False})
    assert memory.offloaded_bytes(replace(plan, cfg=padded)) == 2 * 64 * 2**30
    offloaded = replace(plan, optimizer=OFFLOADED)
    assert memory.offloaded_bytes(offloaded) == 64 * 2**30 + memory.host_needs(offloaded)


@pytest.mark.parametrize(("offloads", "gradients"), [(False, 1.5), (True, 15.0)])
def test_with_offloaded_activations_memory_peaks_at_the_end_of_backward(offloads, gradients):
    """Llama 3.1 8B: BF16 gradients of the head, 1.05 GB, and of one of 32 layers or all."""
    flags = {"recompute": "full", "offload_activations": offloads, "use_te": True, "max_seq_length": 262144}
    plan = plan_of(8.03, "single", gpus=1, batch_size=1, **flags)
    shape = ModelShape(4096, 32, 32, 8, 128, 14_336, 128_256)
    parts = memory.peak(replace(plan, model=replace(plan.model, shape=shape)))
    assert (parts["gradients"] + parts["logits and head gradient"]) / 1e9 == pytest.approx(
        gradients, abs=0.05
    )


# 4 GB per rank of the node's 100 GB, or a quarter.
@pytest.mark.parametrize(("gpus", "per_node", "room"), [(1, 8, 96), (16, 4, 84), (8, 8, 75)])
def test_offloading_leaves_host_memory_to_the_processes_of_a_nodes_ranks(gpus, per_node, room, monkeypatch):
    monkeypatch.setattr(memory, "host_memory", lambda: 100 * 10**9)
    assert memory.host_room(plan_of(8.0, gpus=gpus, gpus_per_node=per_node)) == room * 1e9


@pytest.mark.parametrize(("gpus", "each"), [(2, 8.0), (8, 3.5), (64, 3.5)])
def test_an_exchange_in_fp8_needs_memory_beside_the_gradients(gpus, each):
    model = ModelSize(8_000_000_000, ModelShape(4096, 32, 32, 8, 128, 14_336, 128_256))
    parts = {}
    for dtype in ("bf16", "fp8"):
        plan = replace(plan_of(8.0, "ddp", gpus=gpus, use_te=True, grad_reduce_dtype=dtype), model=model)
        parts[dtype] = memory.start_of_backward(plan)["gathered, communication"]
    assert parts["fp8"] - parts["bf16"] == each * model.head


@pytest.mark.parametrize(
    ("settings", "device", "message"),
    [
        ({"recompute": "full", "offload_activations": True}, "cpu", "offload_activations: without a GPU"),
        ({"recompute": "full", "offload_activations": True}, "cuda", "offload_activations: not possible"),
        ({"recompute": "mlp:1"}, "cuda", "--recompute mlp:1: DeepSpeed ZeRO-3 recomputes all of a layer"),
    ],
)
def test_recomputation_that_cannot_run_is_refused_before_the_data_is_read(settings, device, message):
    strategy = SimpleNamespace(device=torch.device(device), reentrant=True)
    with pytest.raises(UserError, match=message):
        choose.check_recomputation(config_from_dict({"use_te": True, **settings}), strategy)


def test_a_host_too_small_to_offload_to_is_refused(monkeypatch):
    mode, each = "ds_zero3_offload", 20 + 12
    optimizer = OptimizerSpec("torch_adamw", torch.float32, True, ("fp32", "fp32"))
    host(monkeypatch, each * 4e9 + 1)
    choose.refuse_small_host(plan_of(8.0, mode, gpus=16, optimizer=optimizer))
    needs = f"^--sharding_mode {mode}: .* need {each * 8:.0f} GB .* has {each * 4} GB beside.* nodes, or "
    with pytest.raises(UserError, match=f"{needs}--sharding_mode ds_zero3$"):
        choose.refuse_small_host(plan_of(8.0, mode, gpus=8, optimizer=optimizer))
    choose.refuse_small_host(plan_of(1.0, mode, gpus=2, gpus_per_node=2, optimizer=optimizer))


def test_deepspeed_keeps_gradients_in_fp32_on_the_host_if_several_add_up():
    assert host_state(plan_of(8.0, "ds_zero3_offload", gradient_accumulation_steps=4)) == (22, 12)


@pytest.mark.parametrize(("given", "size"), [(None, 4), (2, 2), (8, 8), (1, 1), (3, None), (16, None)])
def test_hsdp_shards_over_a_node_or_a_divisor_of_the_ranks(given, size):
    cfg = config_from_dict({"sharding_mode": "hsdp", "hsdp_shard_size": given})
    if size:
        assert cfg.sharding.shard_size(8, 4) == size
    else:
        with pytest.raises(UserError, match=f"--hsdp_shard_size {given}: does not divide the 8 ranks"):
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
        ("ds_zero1", ADAM, 2 + 12 / 4),
        ("ds_zero2", ADAM, 2 + 12 / 4),
        ("ds_zero3", ADAM, 14 / 4),
        ("ds_zero3_offload", ADAM, 0),
    ],
)
def test_state_by_mode(mode, optimizer, held):
    assert (
        sum(memory.state(plan_of(1.0, mode, gpus=4, gpus_per_node=2, optimizer=optimizer)).values())
        == held * 1e9
    )


@pytest.mark.parametrize(("settings", "known"), [({}, True), ({"compile": False}, False)])
def test_auto_ignores_activations_that_are_not_counted(settings, known, monkeypatch):
    requests = []
    monkeypatch.setattr(choose, "dist", SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setattr(choose, "choose_mode", lambda request, gpu: (requests.append(request) or "ddp", ""))
    cfg = config_from_dict({"model_name": "tiny-qwen3", "mixed_precision": "bf16"} | settings)
    model = find_model("tiny-qwen3", init="random", use_te=False)
    assert choose._resolve_mode(cfg, model, torch.device("cuda"), "bf16", GPU) == "ddp"
    (request,) = requests
    assert (request.model.shape is not None) == known and request.model.parameters > 0


def test_constants_are_those_of_deepspeeds_settings():
    zero3 = SimpleNamespace(**json.loads((ROOT / "ds_configs/zero3.json").read_text())["zero_optimization"])
    assert 2 * zero3.stage3_max_live_parameters == memory.ZERO_LIVE
    assert 2 * 2 * zero3.reduce_bucket_size == memory.ZERO_BUCKETS
