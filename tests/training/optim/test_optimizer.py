"""Choice of optimizer, parameter groups, and access to the state of torch's AdamW."""

import pytest
import torch
from fp8_suite.core.errors import EXIT_BAD_SETTING, UserError
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.estimate.setup import ModelSize, TrainingSetup
from fp8_suite.training.optim import optimizer as optim
from fp8_suite.training.optim.settings import OptimConfig

FP32, BF16 = torch.float32, torch.bfloat16
GPU, CPU = {"on_gpu": True}, {"on_gpu": False}
NO_MASTERS = {"master_weights": "none", "moment_dtype": "bf16"}
ZERO = GPU | {"mode": "ds_zero2"}


def spec_of(settings, *, on_gpu, mode="single"):
    return optim.choose_optimizer(config_from_dict(settings), mode, on_gpu=on_gpu)


@pytest.mark.parametrize(
    ("settings", "where", "expected"),  # kind, parameters, masters, and bytes of weight, gradient and state
    [
        ({}, GPU, ("fused_adamw", BF16, True, 2 + 2 + 2 + 8)),
        ({"moment_dtype": "bf16"}, GPU, ("fused_adamw", BF16, True, 2 + 2 + 2 + 4)),
        ({"moment_dtype": "fp8"}, GPU, ("fused_adamw", BF16, True, 8 + 2 / 64)),
        ({"moment_dtype": "fp8,fp16"}, GPU, ("fused_adamw", BF16, True, 9 + 2 / 64)),
        ({"moment_dtype": "fp8"}, CPU, ("plain_adamw", FP32, True, 10 + 2 / 64)),
        (NO_MASTERS, GPU, ("fused_adamw", BF16, False, 2 + 2 + 4)),
        ({"mixed_precision": "fp32"}, GPU, ("torch_adamw", FP32, True, 4 + 4 + 8)),
        ({}, CPU, ("torch_adamw", FP32, True, 4 + 4 + 8)),
        (NO_MASTERS, CPU, ("torch_adamw", BF16, False, 2 + 2 + 4)),
        ({}, GPU | {"mode": "ds_zero2"}, ("zero_adamw", BF16, True, 2 + 2 + 4 + 8)),
    ],
)
def test_the_spec_keeps_masters_in_fp32_unless_told_otherwise(settings, where, expected):
    spec = spec_of(settings, **where)
    state_bytes = 2 * spec.parameter_dtype.itemsize + spec.master_bytes + spec.moment_bytes
    assert (spec.kind, spec.parameter_dtype, spec.master_weights, state_bytes) == expected
    assert ("no masters" in spec.describe()) == (settings == NO_MASTERS)


@pytest.mark.parametrize(("mode", "fp8"), [("hsdp", True), ("single", False)])  # which gathers nothing
def test_weights_that_are_gathered_in_fp8_are_stored_in_fp8(mode, fp8):
    settings = {"fp8_all_gather": True, "use_te": True, "mixed_precision": "fp8", "fp8_scenario": "current"}
    spec = spec_of(settings | {"sharding_mode": "hsdp"}, **GPU | {"mode": mode})
    assert spec.holds_fp8_weights == fp8 and ("FP8 weights with FP32 masters" in spec.describe()) == fp8


@pytest.mark.parametrize(
    ("settings", "where", "flag"),
    [
        ({"moment_dtype": "fp8"}, ZERO, "moment_dtype"),
        (NO_MASTERS, ZERO, "master_weights"),
        ({"moment_dtype": "fp8,fp8,fp8"}, GPU, "moment_dtype"),
        ({"mixed_precision": "fp32", "offload_optimizer": True}, GPU, "offload_optimizer"),
    ],
)
def test_dtypes_that_the_optimizer_cannot_hold_are_refused(settings, where, flag):
    with pytest.raises(UserError) as refused:
        spec_of(settings, **where)
    assert refused.value.flags == {flag} and refused.value.exit_code == EXIT_BAD_SETTING


@pytest.mark.parametrize(
    ("settings", "where", "on_host"),
    [
        ({}, GPU, 2 + 8),
        (NO_MASTERS, GPU, 4),
        ({"moment_dtype": "fp8"}, CPU, 2 + 2 / 64),
        ({}, CPU, 0),  # it is in host memory anyway
    ],
)
def test_masters_and_moments_are_offloaded(settings, where, on_host):
    spec = spec_of(settings | {"offload_optimizer": True}, **where)
    cfg = config_from_dict(settings)
    setup = TrainingSetup(cfg, ModelSize(10**9), spec, "single", gpus=1, gpus_per_node=1)
    assert setup.offloaded_state == on_host and ("offloaded" in spec.describe()) == bool(on_host)


def test_bf16_moments_warn_of_a_beta2_that_they_cannot_follow():
    specs = [spec_of({"moment_dtype": name}, **GPU) for name in ("bf16", "fp32")]
    assert "--adam_beta2 0.999" in optim.moment_warning(specs[0], 0.999)
    assert optim.moment_warning(specs[0], 0.99) is optim.moment_warning(specs[1], 0.999) is None


def test_every_setting_reaches_the_optimizer_and_only_matrices_decay():
    cfg = OptimConfig(learning_rate=0.5, weight_decay=0.2, adam_beta1=0.7, adam_beta2=0.8, adam_epsilon=1e-3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    matrices, vectors = optim.build_optimizer(model, cfg, spec_of({}, **CPU)).param_groups
    for group in (matrices, vectors):
        assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.7, 0.8), 1e-3)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.2, 0.0)
    assert matrices["params"] == [model[0].weight]
    assert vectors["params"] == [model[0].bias, model[1].weight, model[1].bias]
    assert len(optim.parameter_groups([model[0].weight], 0.1)) == 1, "no empty group"
