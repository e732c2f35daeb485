"""Plans against recorded runs, and against numbers worked out by hand."""

import itertools
import json
import re
import shlex
import subprocess
import sys

import pytest
from fp8_suite.benchmarks.plan.check import Check, check_runs
from fp8_suite.benchmarks.plan.inputs import read_model
from fp8_suite.benchmarks.plan.limits import smallest_card
from fp8_suite.benchmarks.plan.main import main, run
from fp8_suite.benchmarks.plan.predict import make_plan
from fp8_suite.core.errors import UserError
from fp8_suite.core.gpus import GPUS
from fp8_suite.core.packages import ROOT
from fp8_suite.te_models.presets import PRESETS
from fp8_suite.te_models.settings import RECOMPUTE_LEVELS
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.estimate.memory import host_state, start_of_backward
from fp8_suite.training.estimate.sizes import for_tensors
from fp8_suite.training.estimate.step_time import (
    BANDWIDTH_SHARE,
    adam_bytes,
    communication_seconds,
    exchange,
    step_seconds,
)

LLAMA_8B = "meta-llama/Llama-3.1-8B"
N8 = 8_030_261_248  # parameters of the 8B
BLOCK, HEAD = 218_103_808, 128_256 * 4096  # GEMM weights of one of its layers, and of its head
FP8 = {"use_te": True, "mixed_precision": "fp8"}
LOGITS, GATHERED = "logits and head gradient", "gathered, communication"


def plan_of(model=LLAMA_8B, *, gpus=1, gpus_per_node=8, gpu="H200", network_gbs=50.0, **settings):
    defaults = {"model_name": model, "batch_size": 1, "max_seq_length": 8192, "use_te": True}
    cfg = config_from_dict(defaults | settings)
    return make_plan(cfg, GPUS[gpu], gpus=gpus, gpus_per_node=gpus_per_node, network_gbs=network_gbs)


def changed_parts(before, after):
    return {name for name in before if before[name] != after[name]}


# Recorded runs


@pytest.fixture(scope="module")
def checks():
    return check_runs()[0]


def outliers(checks, read, limit):
    errors = {check.name: Check.error(read(check)) for check in checks if read(check)}
    return {name.removeprefix("h200-modes/"): e for name, e in errors.items() if abs(e) > limit}


def test_peaks_of_recorded_runs_are_predicted_within_3_percent(checks):
    assert len(checks) > 150
    wrong = outliers(checks, lambda check: check.memory, 0.03)
    assert set(wrong) == {"same-2gpu-ds_zero3_offload"}  # docs/plan.md names it
    assert max(map(abs, wrong.values())) < 0.06


def test_steps_of_recorded_runs_are_predicted_within_14_percent(checks):
    assert len([check for check in checks if check.seconds]) > 40
    wrong = outliers(checks, lambda check: check.seconds, 0.14)
    # docs/plan.md names them: the 1B's short steps, and ZeRO 3.
    small = ("2gpu-ds_zero3", "2gpu-fsdp_full-again", "8gpu-fsdp_full", "8gpu-fsdp_grad", "8gpu-hsdp")
    known = {f"Llama-3.2-1B-{name}" for name in small} | {"Llama-3.2-3B-8gpu-ds_zero3"}
    known |= {f"Meta-Llama-3.1-8B-{n}" for n in ("4gpu-ds_zero3", "8gpu-ds_zero3")}
    assert set(wrong) == known


def test_docs_hold_the_summary_that_check_prints():
    *_, summary = run(["--check"]).split("\n\n")
    assert summary in (ROOT / "benchmarks/results/predictions.md").read_text(encoding="utf-8")


# Memory


# From the checkpoints' published safetensors indices (total_size / 2).
@pytest.mark.parametrize(
    ("name", "parameters"),
    {
        "meta-llama/Llama-3.2-1B": 1_235_814_400,
        LLAMA_8B: N8,
        "meta-llama/Llama-3.1-405B": 405_853_388_800,
        "Qwen/Qwen2.5-0.5B": 494_032_768,
        "Qwen/Qwen2.5-14B": 14_770_033_664,
        "Qwen/Qwen3-8B": 8_190_735_360,
        "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    }.items(),
)
def test_parameters(name, parameters):
    assert read_model(name).size.parameters == parameters


def test_settings_change_their_own_part():
    plain, low = plan_of().memory, plan_of(moment_dtype="bf16", master_weights="none").memory
    assert plain["moments"] - low["moments"] == 4 * N8
    assert plain["master weights"] == 2 * N8 and low["master weights"] == 0
    # One layer of the 8B in BF16: 4 x 4096 + 2 x 4096 + 2 x 1024 + 3 x 14336 values a token.
    assert plain["activations"] == 32 * 8192 * 2 * 69_632
    assert plan_of(**FP8).memory["FP8 weight copies"] == 2 * 32 * BLOCK
    sharded = plan_of(**FP8, sharding_mode="fsdp_full", gpus=4)  # casts again, layer by layer
    assert sharded.memory["FP8 weight copies"] == 2 * BLOCK
    half = plan_of(**FP8, bf16_first_layers=10, bf16_last_layers=6)
    assert half.memory["FP8 weight copies"] == pytest.approx(32 * BLOCK)


def test_fp8_weights_take_a_byte_and_are_not_cast():
    flags = FP8 | {"offload_optimizer": True, "moment_dtype": "fp8", "recompute": "cheap"}
    plain, stored = (plan_of(**flags, gradient_accumulation_steps=8, fp8_weights=on) for on in (False, True))
    assert plain.memory["weights"] - stored.memory["weights"] == 32 * BLOCK
    assert start_of_backward(stored.setup)["FP8 weight copies"] == BLOCK  # one layer's transposes
    assert host_state(plain.setup)[0] == pytest.approx(4, abs=0.1)
    assert host_state(stored.setup)[0] - host_state(plain.setup)[0] == pytest.approx(2 * 32 * BLOCK / N8)
    # A byte read and one written instead of two casts of a weight, of 4 bytes each.
    saved = 8 * 6 * 32 * BLOCK / (GPUS["H200"].memory_bandwidth * BANDWIDTH_SHARE)
    assert plain.seconds["FP8 casts"] - stored.seconds["FP8 casts"] == pytest.approx(saved)


def test_an_fp8_lm_head_is_faster_and_keeps_its_own_copies():
    plain, fp8 = plan_of(**FP8), plan_of(**FP8, fp8_lm_head=True)
    # Its weight in two layouts, gradients of all logits, four of hidden size; a chunk's logits and gradients.
    chunk = 3 * 4096 * 128_256
    assert fp8.memory[LOGITS] == 2 * HEAD + 8192 * 128_256 + 8 * 8192 * 4096 + chunk
    assert plan_of(**FP8, fp8_lm_head=True, batch_size=2).memory[LOGITS] > fp8.memory[LOGITS] + 2 * HEAD
    assert changed_parts(plain.seconds, fp8.seconds) == {"LM head", "idle"}
    assert 0.5 < fp8.seconds["LM head"] / plain.seconds["LM head"] < 0.7


def test_gathered_weights_by_mode():
    root, block = 2 * HEAD + 4096, BLOCK + 2 * 4096
    # Backward begins: the next block's weights, and what is sent and received of the last one's gradients.
    expected = {"ddp": 0, "fsdp_full": 2 * (root + block) + 6 * block, "fsdp_grad": 2 * N8 + 6 * block}
    for mode, size in expected.items():
        assert plan_of(gpus=4, sharding_mode=mode).memory[GATHERED] == size
    for dtype, size in {"fp32": 4 * N8, "bf16": 0}.items():  # DDP's all-reduce across nodes
        across = plan_of(gpus=16, sharding_mode="ddp", grad_reduce_dtype=dtype)
        assert across.memory[GATHERED] == size


def test_accumulation_keeps_gradients_and_multiplies_the_work():
    settings = {"gpus": 8, "sharding_mode": "fsdp_full", **FP8}
    one, four = (plan_of(gradient_accumulation_steps=n, **settings) for n in (1, 4))
    assert four.memory["gradients"] - one.memory["gradients"] == pytest.approx(4 * N8)
    assert four.seconds["linear layers"] == pytest.approx(4 * one.seconds["linear layers"])
    assert four.seconds["optimizer"] == one.seconds["optimizer"]


def test_activation_checkpointing_trades_memory_for_time():
    plans = [plan_of(**FP8, batch_size=4, recompute=level) for level in RECOMPUTE_LEVELS]
    none, cheap, mlp, layer, full = plans
    assert none.peak > cheap.peak > mlp.peak > layer.peak > full.peak
    assert none.seconds["linear layers"] == cheap.seconds["linear layers"]
    assert cheap.step < mlp.step < layer.step < full.step
    assert layer.seconds["attention"] == none.seconds["attention"] < full.seconds["attention"]
    assert mlp.peak < plan_of(**FP8, batch_size=4, recompute="mlp:16").peak < none.peak


@pytest.mark.parametrize("settings", [FP8, {"recompute": "full"}])
@pytest.mark.parametrize("model", ["meta-llama/Llama-3.2-1B", LLAMA_8B])
def test_the_largest_micro_batch_fits_and_one_more_does_not(model, settings):
    batch = plan_of(model, **settings).largest_batch
    assert plan_of(model, batch_size=batch, **settings).fits
    assert not plan_of(model, batch_size=batch + 1, **settings).fits


def test_the_8b_fills_an_h200_and_does_not_fit_an_h100():
    assert plan_of(**FP8).largest_batch == 1
    small = plan_of(**FP8, gpu="H100")
    assert small.largest_batch == 0 and not small.fits and small.peak > for_tensors(1e9 * small.gpu.memory_gb)
    assert for_tensors(150.1e9) == pytest.approx(148.1e9)  # 2 GB are not for tensors


# Time


def test_a_memory_limit_is_a_smaller_gpu():
    assert plan_of(batch_size=1, moment_dtype="fp8").fits
    limited = plan_of(batch_size=1, moment_dtype="fp8", memory_limit_gb=60.0)
    assert limited.gpu.memory_gb == 60 and not limited.fits


@pytest.mark.parametrize(
    ("settings", "traffic"),
    [
        ({}, 26),
        ({"moment_dtype": "bf16"}, 18),
        ({"moment_dtype": "fp8"}, 14 + 4 / 64),
        ({"master_weights": "none"}, 22),
    ],
)
def test_optimizer_traffic(settings, traffic):
    assert adam_bytes(plan_of(**settings).setup) == traffic


def test_attention_of_cudnn_has_its_own_rate():
    flash, cudnn = (plan_of(flash_attention=on).seconds["attention"] for on in (True, False))
    assert [flash, cudnn] == pytest.approx([0.1233, 0.1430], rel=0.01)  # of the 8B's 52.8 TFLOP


GATHERED_IN_FP8 = FP8 | {"fp8_scenario": "current", "sharding_mode": "fsdp_full", "fp8_all_gather": True}


def test_zero_has_a_slower_optimizer_and_fp8_weights_are_quantized():
    suite, fp8 = (plan_of(gpus=8, **(GATHERED_IN_FP8 | {"fp8_all_gather": on})) for on in (False, True))
    assert adam_bytes(fp8.setup) - adam_bytes(suite.setup) == pytest.approx(5 * 32 * BLOCK / N8)
    assert 1 < fp8.seconds["optimizer"] / suite.seconds["optimizer"] < 1.25
    zero = plan_of(gpus=8, sharding_mode="ds_zero1")
    assert zero.seconds["optimizer"] > 1.5 * suite.seconds["optimizer"]
    one, plain = plan_of(**GATHERED_IN_FP8), plan_of(**GATHERED_IN_FP8 | {"fp8_all_gather": False})
    assert (one.memory, one.seconds) == (plain.memory, plain.seconds), "one GPU has nothing to gather"


def test_bytes_of_an_exchange():
    for mode, bytes_per_parameter in {"ddp": 4, "fsdp_full": 6, "fsdp_grad": 4}.items():
        assert exchange(plan_of(gpus=8, sharding_mode=mode).setup).within == bytes_per_parameter * N8
    assert exchange(plan_of(sharding_mode="fsdp_full", gpus=16).setup).within == 8 * N8  # FP32 across nodes
    assert exchange(plan_of().setup).within == 0
    # 1/8 of a gradient in FP32, reduced among the copies: twice its bytes.
    assert exchange(plan_of(sharding_mode="hsdp", gpus=16).setup).across == N8


@pytest.mark.parametrize(
    ("mode", "gpus", "network", "seconds"),
    [
        ("ddp", 8, 50e9, 4 * N8 * 7 / 8 / (450e9 * 0.75)),  # inside a node
        # 8 copies on a node each: a card sends 1/8 of the gradient, in FP32 and twice, 7 hops far, which is
        # slower than the 8 bytes a parameter within a node; 32 layers, 2 collectives.
        ("hsdp", 64, 5e9, N8 * 7 / 8 / 5e9 + 7 * 32 * 2 * 10e-6),
        # 8 bytes a parameter, 7 of 8 nodes' worth over a node's 8 cards; 7 hops, 32 layers, 3 collectives.
        ("fsdp_full", 64, 5e9, 8 * N8 * 7 / 8 / (8 * 5e9) + 7 * 32 * 3 * 10e-6),
        # All of that but the network's part crosses a node's links too, here the busier of the two.
        ("fsdp_full", 64, 500e9, 8 * N8 * 7 / 8 / (450e9 * 0.75) + 7 * 32 * 3 * 10e-6),
    ],
)
def test_rings_by_hand(mode, gpus, network, seconds):
    setup = plan_of(gpus=gpus, sharding_mode=mode).setup
    assert communication_seconds(setup, GPUS["H200"], network) == pytest.approx(seconds)


def test_scaling_out():
    plans = [plan_of(gpus=n, sharding_mode="fsdp_full", **FP8) for n in (8, 64, 512, 4096)]
    for one, more in itertools.pairwise(plans):
        assert more.tokens_per_second / more.setup.gpus < one.tokens_per_second / one.setup.gpus
        assert more.peak < one.peak
    slow = {"gpus": 64, "gradient_accumulation_steps": 4, "network_gbs": 5.0, **FP8}
    full, hybrid = (plan_of(sharding_mode=mode, **slow) for mode in ("fsdp_full", "hsdp"))
    assert hybrid.step < full.step, "hsdp spares a slow network"


def test_the_mode_is_that_of_training():
    assert plan_of().setup.mode == "single"
    assert plan_of(gpus=8).setup.mode == "fsdp_grad"
    assert plan_of("tiny-llama", gpus=8, max_seq_length=1024).setup.mode == "ddp"
    assert plan_of("meta-llama/Llama-3.1-405B", gpus=8).setup.mode == "fsdp_full"


# The command


def test_rates_days_and_cost_by_hand():
    plan = plan_of(gpus=8, sharding_mode="fsdp_grad", **FP8)
    assert plan.tokens_per_second == pytest.approx(8 * 8192 / plan.step)
    assert plan.days(1e12) == pytest.approx(1e12 / (8 * 8192 / plan.step) / 86_400)
    # 51.47 GFLOP a token (te_models/shape.py).
    assert plan.tflops == pytest.approx(51.47e-3 * 8192 / plan.step, rel=1e-3)
    flags = "--batch_size 1 --max_seq_length 8192 --use_te --mixed_precision fp8 --sharding_mode fsdp_grad"
    text = run(f"--model_name {LLAMA_8B} {flags} --gpus 8 --tokens 1e12 --price_per_gpu_hour 2.5".split())
    cost = f"{plan.days(1e12) * 24 * 8 * 2.5:,.0f}"
    assert re.search(rf"\| {plan.days(1e12):,.1f} +\| {re.escape(cost)} +\|", text)
    small = run(shlex.split("--model_name tiny-llama --gpus 1 --tokens 1e9 --price_per_gpu_hour 3"))
    plan = plan_of("tiny-llama", batch_size=8, max_seq_length=1024, use_te=False)
    assert small.startswith("2.30 million parameters")
    assert small.splitlines()[4].endswith(f"| {plan.days(1e9) * 24 * 3:.2g}  |")


@pytest.mark.parametrize(("mode", "copies"), [("ddp", 2), ("fsdp_grad", 1)])
def test_an_offloaded_optimizer_takes_host_memory_and_time(mode, copies):
    settings = {"gpus": 2, "sharding_mode": mode, **FP8}
    plain, offloaded = (plan_of(**settings, offload_optimizer=offload) for offload in (False, True))
    assert changed_parts(plain.memory, offloaded.memory) == {"master weights", "moments"}
    assert plain.peak - offloaded.peak == pytest.approx(10 * N8 * copies / 2)
    seconds = 10 * N8 * copies / 2 / 50e9
    assert changed_parts(plain.seconds, offloaded.seconds) == {"optimizer", "idle"}
    assert offloaded.seconds["optimizer"] == pytest.approx(seconds, rel=0.02)
    assert offloaded.host_gb() == (pytest.approx(10 * N8 * copies / 1e9), 0)


AUTO = "--batch_size auto --recompute auto"


@pytest.mark.parametrize(
    ("flags", "way"),
    [
        ("--batch_size 1000 --gpus 1", "--global_batch_size 1000 --batch_size auto --recompute auto"),
        (f"{AUTO} --max_seq_length 131072 --gpus 1", "--moment_dtype fp8"),
        ("--batch_size 1 --gpus 8 --sharding_mode hsdp --gpu H100 --hsdp_shard_size 1", "fsdp_full"),
        (f"{AUTO} --gpus 1 --gpu L40S", "--offload_optimizer"),
        (f"{AUTO} --global_batch_size 512 --gpus 1 --gpu H100 --moment_dtype fp8", "--offload_opt"),  # faster
    ],
)
def test_the_first_way_out_and_the_fastest_are_as_predicted(flags, way):
    command = f"--model_name {LLAMA_8B} --use_te --mixed_precision fp8 --max_seq_length 8192 {flags}".split()
    text = run(command)
    ways = re.findall(r"^- (--.*?): ([\d.]+) GB per GPU, ([\d,]+) tokens/s", text, re.MULTILINE)
    assert len(ways) in (1, 2) and way in ways[0][0]
    for added, *numbers in ways:
        added, _, dropped = added.partition(" without ")
        kept = command[: command.index(dropped)] if dropped else command
        assert all(f"| {number} " in run([*kept, *added.split()]) for number in numbers)


def test_a_run_that_fits_without_auto_gets_no_advice():
    flags = "--use_te --mixed_precision fp8 --moment_dtype fp8 --batch_size 1 --gpus 1"
    assert " with\n" not in run(f"--model_name {LLAMA_8B} {flags}".split())


@pytest.mark.parametrize(
    ("flags", "kept", "saving"),
    [
        # Layer inputs and attention results: 32 layers x 2 x 2**30 bytes.
        ("--gpus 1 --recompute layer --offload_activations --max_seq_length 131072", 64 * 2**30, 0),
        ("--gpus 1 --offload_optimizer --moment_dtype fp16", 6 * N8, 0),
        ("--gpus 2 --sharding_mode ds_zero3_offload", 20 * N8, 12 * N8),
    ],
)
def test_host_memory_of_offload(flags, kept, saving):
    text = run(f"--model_name {LLAMA_8B} --use_te --mixed_precision fp8 --batch_size 1 {flags}".split())
    assert f": {kept / 1e9:.0f} GB of host memory per node, {saving / 1e9:.0f} more while saving" in text


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        (LLAMA_8B, "--sharding_mode fsdp_full --batch_size 1 --gpus 8 --global_batch_size 64"),
        ("meta-llama/Llama-3.1-70B", "--batch_size 8 --gpus 1024 --recompute layer"),
    ],
)
def test_the_longest_sequence_keeps_the_sequences_of_a_step(model, flags):
    """FSDP sums whole gradients over micro-batches, which the 70B fits only in one."""
    command = f"--model_name {model} --use_te --mixed_precision fp8 {flags}".split()
    longest = int(re.search(r"\| ([\d,]+) +\|$", run(command), re.MULTILINE)[1].replace(",", ""))
    assert longest >= 1024
    total = 64 if "64" in command else 8192
    for length, fits in ((longest, True), (longest + 1024, False)):
        auto = f"--batch_size auto --global_batch_size {total} --max_seq_length {length}"
        assert ("does not fit" not in run([*command, *auto.split()])) == fits


def test_the_plan_refuses_what_training_refuses_for_a_number_of_gpus():
    flags = f"--model_name {LLAMA_8B} --use_te --mixed_precision fp8 --batch_size 1"
    text = run(f"{flags} --gpus 1,8 --grad_reduce_dtype fp8".split())
    assert "1 GPU: --grad_reduce_dtype fp8: one device exchanges no gradients" in text and "| 8 " in text
    with pytest.raises(UserError, match=r"--memory_limit_gb 300\.0: the GPU has 150\.1 GB; give less"):
        run(f"{flags} --gpus 8 --memory_limit_gb 300".split())
    assert "| 80 GB " in run(f"{flags} --gpus 1 --memory_limit_gb 16 --moment_dtype fp8".split())


def test_the_plan_chooses_and_refuses_as_training_does():
    flags = f"--model_name {LLAMA_8B} --use_te --mixed_precision fp8 --max_seq_length 4096 --gpus 3,8"
    text = run(f"{flags} --batch_size auto --global_batch_size 64".split())
    assert "3 GPUs: --global_batch_size 64: cannot be shared by 3 ranks; use 63" in text
    fit = re.search(r"^8 GPUs: fit: --batch_size (\d+) x (\d+) .* predicted (.*) of 150.1 GB$", text, re.M)
    batch, accumulation, gb = fit.groups()
    assert int(batch) * int(accumulation) * 8 == 64 and f"| fsdp_grad | {gb} " in text
    assert "sequences of 4096 tokens; 150.1 GB" in text
    with pytest.raises(UserError, match=r"--global_batch_size 3 .*: cannot be shared by 8 ranks; use 64"):
        run(["--global_batch_size", "3", "--gpus", "7,8"])
    small = run(f"{flags} --gpu L40S --batch_size auto --global_batch_size 32 --gpus 1".split())
    assert "1 GPU: no fit: --batch_size 1 x 32 micro-batches; predicted" in small


def test_the_plan_names_the_smallest_gpu_the_largest_model_and_the_longest_sequence():
    flags = f"--model_name {LLAMA_8B} --use_te --mixed_precision fp8 --batch_size 1 --max_seq_length 8192"
    rows = [row.split("|") for row in run([*flags.split(), "--gpus", "1,8"]).splitlines()[-2:]]
    (_, card, model, length), (_, small_card, *_) = ([cell.strip() for cell in row[1:-1]] for row in rows)
    assert (card, small_card, model, length) == ("141 GB", "80 GB", LLAMA_8B, "8,192")
    longer = run([*flags.split(), "--gpus", "1", "--max_seq_length", "9216"])
    assert "does not fit" in longer and "| 180 GB " in longer


READMES_MODELS = {
    "Llama 3.2 1B": "meta-llama/Llama-3.2-1B",
    "Llama 3.2 3B": "meta-llama/Llama-3.2-3B",
    "Qwen3 4B": "Qwen/Qwen3-4B",
    "Qwen2.5 7B": "Qwen/Qwen2.5-7B",
    "Llama 3.1 8B": LLAMA_8B,
    "Qwen2.5 14B": "Qwen/Qwen2.5-14B",
}


@pytest.mark.parametrize("model", READMES_MODELS)
def test_readme_names_the_smallest_gpu_of_each_model(model):
    settings = {"moment_dtype": "fp8", "grad_reduce_dtype": "bf16", "batch_size": "auto", "recompute": "auto"}
    settings |= {"max_seq_length": 1024, "global_batch_size": 64, **FP8}
    cards = [
        smallest_card(plan_of(READMES_MODELS[model], **settings, offload_optimizer=small, fp8_weights=small))
        for small in (False, True)
    ]
    readme = (ROOT / "README.md").read_text()
    assert re.search(rf"^\| {re.escape(model)} \|.*\| {cards[0]} \| {cards[1]} \|$", readme, re.MULTILINE)


BAD_INPUT = {
    "--gpu_memory_gb 1e300": "--gpu_memory_gb: 1e300: must be a positive number below 1e.18",
    "--gpu MI300X": "RTX 5090, or add --gpu_memory_gb, --bf16_tflops, --memory_tbs, --link_gbs",
    "--gpu MI300X --gpu_memory_gb 192 --bf16_tflops 1300": "--link_gbs .and --fp8_tflops, if it has FP8",
    "--gpu A100 --mixed_precision fp8": "--gpu A100 --mixed_precision fp8: this GPU has no FP8; use bf16",
    "--mixed_precision fp8 --use_te --fp8_scenario mxfp8": "--gpu H200: needs a GPU of B200, GB200, B300$",
    "--mixed_precision fp8 --use_te --fp8_scenario block --gpu L40S": "--gpu L40S: needs a GPU of H100",
    "--mixed_precision fp8 --use_te --fp8_scenario block --fp8_fp32_scales --gpu B200": "--gpu B200: ",
    "--use_te --deterministic --no_flash_attention": "--deterministic --no_flash_attention: ",
    "--mixed_precision fp32": "--mixed_precision fp32: predictions cover bf16 and fp8",
    "--precision_map layers.0=bf16": "--precision_map",
    "--mixed_precision fp8 --use_te --bf16_first_layers 32": "--bf16_first_layers 32",
    "--use_te --te_backend emulated --mixed_precision fp8": "--te_backend emulated",
    "--max_steps 0": "--max_steps 0: evaluates only",
    "--gpus 0": "--gpus: '0'",
    "--gpus 8,x": "--gpus: 'x'",
    "--gpuss 8": "unknown flag --gpuss; did you mean '--gpus'",
    "--price_per_gpu_hour 3": "--price_per_gpu_hour 3: needs --tokens",
    "--model_name no/such": "--model_name no/such: neither a preset .te_models/presets.py",
    "--model_name llama-3.1-8b": r"did you mean .meta-llama/Llama-3\.1-8B.\?",
    "--sharding_mode hsdp --gpus 12": "--hsdp_shard_size 8: does not divide the 12 ranks",
    "--sharding_mode deepspeed --deepspeed_config ds_configs/zero2.json --gpus 8": "cover ds_zero1",
    "--max_seq_length 131073": "--max_seq_length 131073: ",
    "--check --batch_size 1": "--check: cannot be combined with --batch_size",
    "--check --tokens 5": "--check: cannot be combined with --tokens",
}


@pytest.mark.parametrize("flags", BAD_INPUT)
def test_bad_input_is_one_clear_line(flags, capsys):
    assert main(shlex.split(flags)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and re.search(BAD_INPUT[flags], error)


@pytest.mark.parametrize(
    ("changes", "flags", "reason"),
    [
        *(({"hidden_size": size}, {}, "hidden_size is") for size in (0, -2048, float("nan"), 2048.5, "2048")),
        ({"num_hidden_layers": 100_000}, {}, "num_hidden_layers is 100000, not .* from 1 to 1000"),
        ({"num_attention_heads": 7}, {}, "num_attention_heads .7. is not a multiple of"),
        ({"vocab_size": None}, {}, "vocab_size"),
        ({"model_type": "mixtral"}, {}, "model type 'mixtral'; choose one of llama"),
        ({"sliding_window": 8, "model_type": "mistral"}, {"max_seq_length": 9}, "sliding window of 8 tokens"),
        ({"rms_norm_eps": "1e-5"}, {"use_te": True}, "its config.json: .*rms_norm_eps"),
        ({"attention_bias": True}, {"use_te": True}, "attention_bias=True.*drop --use_te$"),
        ({"intermediate_size": 8200}, FP8, "intermediate_size 8200 not a multiple of 16"),
        ({"vocab_size": 32001}, FP8 | {"fp8_lm_head": True}, "vocabulary 32001 not a multiple of 16"),
    ],
)
def test_a_model_that_training_refuses_is_not_planned(tmp_path, changes, flags, reason):
    preset = PRESETS["meta-llama/Llama-3.2-1B"]
    (tmp_path / "config.json").write_text(json.dumps(preset))
    assert read_model(str(tmp_path)) == read_model("meta-llama/Llama-3.2-1B")
    (tmp_path / "config.json").write_text(json.dumps(preset | changes))
    cfg = config_from_dict({"model_name": str(tmp_path)} | flags)
    with pytest.raises(UserError, match=reason):
        make_plan(cfg, GPUS["H200"], gpus=1)


def test_a_gpu_is_described_by_flags():
    gpu = "--gpu X --gpu_memory_gb 205 --bf16_tflops 1307 --fp8_tflops 2614 --memory_tbs 5.3 --link_gbs 4"
    assert "205 GB per GPU" in run(f"{gpu} --gpus 1,8 --use_te --mixed_precision fp8".split())
    assert "120 GB per GPU" in run(["--gpu", "NVIDIA h200", "--gpu_memory_gb", "120", "--gpus", "1"])


@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        ("--help", 0, "--price_per_gpu_hour"),
        ("--gpu A100 --mixed_precision fp8", 2, "no FP8"),
        ("--global_batch_size 3 --gpus 7", 2, "cannot be shared"),
        ("--max_seq_length 131073", 2, "--max_seq_length"),
    ],
)
def test_help_and_refusals_are_answered_before_torch_is_imported(flags, code, text):
    command = f"""
import runpy, sys
sys.argv = ["plan", *{flags.split()}]
try:
    runpy.run_module("benchmarks.plan", run_name="__main__")
finally:
    assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code and text in done.stdout + done.stderr


def test_a_number_of_gpus_given_twice_is_planned_once():
    text = run(["--model_name", "tiny-llama", "--gpus", "1,1"])
    assert len(re.findall(r"^\| 1 ", text, re.MULTILINE)) == 2, "one row in each table of rows"


def test_parts_of_a_step_are_positive_for_every_recipe():
    for recipe, gpu in (("block", "H200"), ("nvfp4", "B200"), ("mxfp8", "B300"), ("current", "RTX 4090")):
        plan = plan_of("Qwen/Qwen3-8B", gpus=8, gpu=gpu, fp8_scenario=recipe, **FP8)
        assert min(*plan.memory.values(), *step_seconds(plan.setup, plan.gpu).values()) >= 0
