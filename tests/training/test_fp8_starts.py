"""Whole runs that start from FP8 weights."""

from pathlib import Path

import pytest
import torch
from fp8_suite.te_models.quantized.forms import quantize_blocks
from fp8_suite.training.config import parse_config
from fp8_suite.training.resolve import resolve
from safetensors.torch import load_file

from tests.children import preload
from tests.fp8_checkpoints import assert_exact_masters, fine_grained, power_of_two, save_fp8
from tests.training.conftest import HALF
from tests.training.parallel.jobs import record
from tests.training.parallel.jobs import train as train_on_ranks
from tests.training.test_run import train as train_small

preload(__name__)


def train(folder: Path, model: Path, flags: str) -> Path:
    flags = f"--model_name {model} --tokenizer_name demo --max_steps 3 --no_save_checkpoints {flags}"
    return train_small(folder, flags)


LAYERS = "--use_te --te_backend emulated --mixed_precision fp8 --fp8_scenario current", "--no_use_te"


@pytest.mark.parametrize("layers", LAYERS, ids=["te", "hf"])
def test_masters_in_a_checkpoint_are_exact(layers, tmp_path):
    """A learning rate this small changes no bit, of zeros either."""
    save_fp8(tmp_path / "fp8", fine_grained((32, 32)), **HALF)
    flags = f"{layers} --max_steps 1 --save_interval 1 --learning_rate 1e-300 --save_checkpoints --no_export"
    flags = flags.replace("--no_use_te", "--no_use_te --mixed_precision bf16")
    run = train(tmp_path / "run", tmp_path / "fp8", flags)
    assert_exact_masters(run, tmp_path / "fp8", use_te="--no_use_te" not in flags)


FP8_EXPORT = "--export_dtype fp8"
BLOCK = "--use_te --te_backend emulated --mixed_precision fp8 --fp8_scenario block"


BF16 = "--no_use_te --mixed_precision bf16"


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
EXPERTS |= {"model_type": "qwen3_moe"}


@pytest.mark.parametrize(
    ("layers", "learning_rate", "weights"),
    [(BLOCK, "1e-5", 21), (BF16, "1e-5", 21), (f"{BF16} --lora_rank 4", "1e-4", 21), (BF16, "1e-5", 48)],
    ids=["block", "bf16", "lora", "experts"],
)
def test_small_updates_of_fp8_weights_reach_the_fp8_export(layers, learning_rate, weights, tmp_path):
    """Steps this small move no weight but tiny ones from the middle of its interval to the next one."""
    sizes = HALF | (EXPERTS if weights == 48 else {})
    tensors = save_fp8(tmp_path / "fp8", fine_grained(), rule=power_of_two, **sizes)
    for rate, moves in (("1e-300", False), (learning_rate, True)):
        run = train(tmp_path / rate, tmp_path / "fp8", f"{layers} {FP8_EXPORT} --learning_rate {rate}")
        exported = load_file(run / "export_fp8" / "model.safetensors")
        for file in ("env.json", "summary.json"):
            assert record(run, file)["dequantized_weights"].startswith(f"{weights} tensors (fp8)")
        names = [name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn]
        values = [(tensors[name].float(), exported[name].float()) for name in names]
        shares = [(before != after)[before.abs() >= 16].float().mean() for before, after in values]
        assert len(shares) == weights
        assert all(0.001 < share < 0.1 if moves else share == 0 for share in shares)


def test_weights_without_adapters_are_rounded_to_nearest(tmp_path):
    """Scales per tensor are no powers of two, so an export in blocks rounds all weights."""
    tensors = save_fp8(tmp_path / "fp8", fine_grained(None), **HALF)
    flags = f"{BF16} {FP8_EXPORT} --lora_rank 4 --lora_targets q_proj --learning_rate 1e-300"
    exported = load_file(train(tmp_path / "run", tmp_path / "fp8", flags) / "export_fp8/model.safetensors")
    for name in [name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn]:
        weight = tensors[name].float() * tensors[f"{name}_scale_inv"]
        nearest, scales = quantize_blocks(weight.bfloat16().float())
        assert torch.equal(exported[f"{name}_scale_inv"], scales)
        assert torch.equal(exported[name].float(), nearest.float()) == ("q_proj" not in name)


def test_ranks_round_at_random_as_one_device_does(tmp_path):
    save_fp8(tmp_path / "fp8", fine_grained(None), **HALF, **EXPERTS)
    flags = f"--model_name {tmp_path}/fp8 --tokenizer_name demo --max_steps 1 --no_save_checkpoints"
    flags += f" {BF16} {FP8_EXPORT} --learning_rate 1e-300"
    train_small(tmp_path / "one", flags)
    train_on_ranks(tmp_path / "two", f"{flags} --sharding_mode fsdp_full", ranks=2)
    one, two = (load_file(tmp_path / name / "export_fp8/model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.equal(tensor.float(), two[name].float()) for name, tensor in one.items())


@pytest.mark.parametrize(
    ("flags", "dithered"),
    [
        (BLOCK, True),
        (LAYERS[0], True),
        (f"{BF16} {FP8_EXPORT}", False),
        (f"{BLOCK} --lora_rank 4", False),
        (f"{BLOCK} --max_steps 0 --eval_samples 10", False),
    ],
)
def test_fp8_weights_are_dithered_where_they_are_trained_in_fp8(flags, dithered, tmp_path):
    save_fp8(tmp_path / "fp8", fine_grained(), rule=power_of_two, **HALF)
    flags = f"--model_name {tmp_path}/fp8 --tokenizer_name demo {flags}".split()
    assert resolve(parse_config(flags, prog="test", description="test")).model.dithers == dithered
