"""Plans against recorded runs, and against numbers worked out by hand."""

import itertools
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.plan import check as plan_check
from benchmarks.plan import memory as plan_memory
from benchmarks.plan.check import Check, check_runs
from benchmarks.plan.job import read_model
from benchmarks.plan.main import main, make_plan, room, run, state_bytes
from benchmarks.plan.memory import peak
from benchmarks.plan.time import GPUS, adam_bytes, communication_seconds, exchange, step_seconds
from data import build as data
from te_models.loss import CHUNK_BYTES
from te_models.loss_fp8 import TOKENS_OF_A_GEMM
from te_models.presets import PRESETS
from training.config import config_from_dict
from training.parallel.strategies import FSDP
from training.parallel.zero import Zero

ROOT = Path(__file__).resolve().parents[2]
LLAMA_8B = "meta-llama/Llama-3.1-8B"
N8 = 8_030_261_248  # parameters of the 8B
FP8 = {"use_te": True, "mixed_precision": "fp8"}


def plan_of(model=LLAMA_8B, *, gpus=1, gpus_per_node=8, gpu="H200", network_gbs=50.0, **settings):
    given = {"batch_size": 1, "max_seq_length": 8192, "use_te": True} | settings
    cfg = config_from_dict({"model_name": model} | given)
    return make_plan(cfg, GPUS[gpu], gpus=gpus, gpus_per_node=gpus_per_node, network_gbs=network_gbs)


@pytest.fixture(scope="module")
def checks():
    return check_runs()[0]


def test_peaks_are_predicted_within_3_percent(checks):
    assert len(checks) >= 45
    wrong = {
        check.name: Check.error(check.memory) for check in checks if abs(Check.error(check.memory)) > 0.03
    }
    # What docs/plan.md says of ZeRO 2 and of offload.
    known = {"h200-modes/Meta-Llama-3.1-8B-2gpu-ds_zero2", "h200-modes/same-2gpu-ds_zero3_offload"}
    assert wrong.keys() == known
    assert max(map(abs, wrong.values())) < 0.06


def test_steps_are_predicted_within_15_percent(checks):
    timed = [check for check in checks if check.seconds]
    assert len(timed) >= 40
    wrong = {
        check.name: Check.error(check.seconds) for check in timed if abs(Check.error(check.seconds)) > 0.14
    }
    # What docs/plan.md says of rowwise scaling on small models, of ZeRO, and of the 1B's short steps.
    known = {f"h200-recipes/{model}-rowwise" for model in ("Llama-3.2-1B", "Qwen2.5-1.5B")}
    small = ("4gpu-hsdp", "2gpu-ds_zero3", "2gpu-fsdp_full-again", "2gpu-fsdp_grad-again")
    small += ("8gpu-fsdp_full", "8gpu-fsdp_grad", "8gpu-hsdp")
    known |= {f"h200-modes/Llama-3.2-1B-{mode}" for mode in small} | {"h200-modes/Llama-3.2-3B-8gpu-ds_zero3"}
    large = itertools.product((4, 8), ("ds_zero2", "ds_zero3"))
    known |= {f"h200-modes/Meta-Llama-3.1-8B-{gpus}gpu-{mode}" for gpus, mode in large}
    known |= {"h200-modes/Meta-Llama-3.1-8B-2gpu-hsdp-bf16"}
    assert wrong.keys() == known


def test_what_is_compared_is_what_was_recorded(checks):
    by_name = {check.name: check for check in checks}
    folder = ROOT / "benchmarks/results/h200-multi/8b-4gpu-fsdp_full"
    summary = json.loads((folder / "summary.json").read_text())
    memory, seconds = (
        by_name["h200-multi/8b-4gpu-fsdp_full"].memory,
        by_name["h200-multi/8b-4gpu-fsdp_full"].seconds,
    )
    assert memory[0] == summary["peak_memory_gb"]
    assert seconds[0] == pytest.approx(4 * 8192 / summary["tokens_per_second"])


def test_attention_of_cudnn_is_planned_with_a_rate_of_its_own():
    names = ("Llama-3.1-8B-8192-delayed", "Llama-3.1-8B-8192-delayed-cudnn")
    both = [plan_check.recorded_job(plan_check.RESULTS / "h200-flash-attention" / name) for name in names]
    assert [job.flash_attention for job in both] == [True, False]
    seconds = [step_seconds(job, GPUS["H200"])["attention"] for job in both]
    assert seconds == pytest.approx([0.1233, 0.1430], rel=0.01)  # of the 8B's 52.8 TFLOP


def test_env_json_decides_what_the_code_of_a_recorded_run_did():
    first, second, last = (
        plan_check.recorded_job(plan_check.RESULTS / name)
        for name in (
            "h200/Llama-3.1-8B-8192-bf16",
            "h200-fused-adamw/Llama-3.1-8B-8192-bf16",
            "h200-profile/Llama-3.1-8B-8192-delayed-accumulation8-fast",
        )
    )
    assert first == replace(second, slow_adam=True)
    assert [(job.slow_adam, job.two_chunks) for job in (second, last)] == [(False, True), (False, False)]
    # Then the head's gradient in BF16 was made beside a chunk of logits.
    more = sum(peak(replace(last, two_chunks=True)).values()) - sum(peak(last).values())
    assert more == 2 * 128_256 * 4096


def test_docs_hold_the_table_that_check_prints():
    assert run(["--check"]) in (ROOT / "docs/plan.md").read_text(encoding="utf-8")


def test_what_the_plan_counts_with_is_what_training_does():
    assert (plan_memory.LOGITS_CHUNK, plan_memory.TOKENS_OF_A_HEAD_GEMM) == (CHUNK_BYTES, TOKENS_OF_A_GEMM)
    zero3 = json.loads((ROOT / "ds_configs/zero3.json").read_text())["zero_optimization"]
    assert 2 * zero3["stage3_max_live_parameters"] == plan_memory.ZERO_LIVE
    assert 2 * 2 * zero3["reduce_bucket_size"] == plan_memory.ZERO_BUCKETS


@pytest.mark.parametrize(("mode", "kind"), [("fsdp_offload", FSDP), ("ds_zero3_offload", Zero)])
@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 4}])
def test_hosts_are_counted_as_training_counts_them(mode, kind, settings):
    plan = plan_of(gpus=4, sharding_mode=mode, **settings)
    cfg = config_from_dict(settings)
    strategy, state = kind.__new__(kind), state_bytes(cfg, mode)
    strategy.cfg = cfg
    kept, saved = plan_memory.host_bytes(plan.job)
    assert kept == strategy.host_bytes(state, saves=False)
    assert kept + saved == strategy.host_bytes(state, saves=True)


# From the checkpoints' published safetensors indices (total_size / 2).
@pytest.mark.parametrize(
    "name, parameters",
    {
        "meta-llama/Llama-3.2-1B": 1_235_814_400,
        "meta-llama/Llama-3.2-3B": 3_212_749_824,
        LLAMA_8B: N8,
        "meta-llama/Llama-3.1-70B": 70_553_706_496,
        "meta-llama/Llama-3.1-405B": 405_853_388_800,
        "Qwen/Qwen2.5-0.5B": 494_032_768,
        "Qwen/Qwen2.5-14B": 14_770_033_664,
        "Qwen/Qwen3-8B": 8_190_735_360,
        "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    }.items(),
)
def test_parameters(name, parameters):
    assert read_model(name).parameters == parameters


# docs/multi_gpu.md: bytes per parameter of weights, masters and moments.
@pytest.mark.parametrize(
    "mode, state",
    {
        "ddp": 12,
        "fsdp_full": 12 / 4,
        "fsdp_grad": 12 / 4,
        "fsdp_offload": 0,
        "ds_zero1": 2 + 12 / 4,
        "ds_zero2": 2 + 12 / 4,
        "ds_zero3": 14 / 4,
    }.items(),
)
def test_state_by_mode(mode, state):
    memory = plan_of(gpus=4, sharding_mode=mode).memory
    held = sum(memory[part] for part in ("weights", "master weights", "moments"))
    assert held == pytest.approx(state * N8)


def test_hsdp_holds_a_shard_of_its_group():
    memory = plan_of(gpus=16, sharding_mode="hsdp", hsdp_shard_size=4).memory
    assert memory["moments"] == pytest.approx(8 * N8 / 4)


def test_settings_change_their_own_part():
    plain, low = plan_of().memory, plan_of(moment_dtype="bf16", master_weights="none").memory
    assert plain["moments"] - low["moments"] == 4 * N8
    assert plain["master weights"] == 2 * N8 and low["master weights"] == 0
    # One layer of the 8B in BF16: 4 x 4096 + 2 x 4096 + 2 x 1024 + 3 x 14336 values a token.
    assert plain["activations"] == 32 * 8192 * 2 * 69_632
    assert plan_of(**FP8).memory["FP8 weight copies"] == 2 * 32 * 218_103_808
    sharded = plan_of(**FP8, sharding_mode="fsdp_full", gpus=4)  # casts again, layer by layer
    assert sharded.memory["FP8 weight copies"] == 2 * 218_103_808
    half = plan_of(**FP8, bf16_first_layers=10, bf16_last_layers=6)
    assert half.memory["FP8 weight copies"] == pytest.approx(32 * 218_103_808)


def test_an_fp8_lm_head_is_faster_and_holds_its_own():
    plain, fp8 = plan_of(**FP8), plan_of(**FP8, fp8_lm_head=True)
    head, logits = 128_256 * 4096, "logits and head gradient"
    # Its weight in two layouts, gradients of all logits, four of hidden size; a chunk's logits and gradients.
    chunk = 3 * 4096 * 128_256
    assert fp8.memory[logits] == 2 * head + 8192 * 128_256 + 8 * 8192 * 4096 + chunk
    assert plan_of(**FP8, fp8_lm_head=True, batch_size=2).memory[logits] > fp8.memory[logits] + 2 * head
    others = [part for part in plain.seconds if part not in ("LM head", "idle")]
    assert all(fp8.seconds[part] == plain.seconds[part] for part in others)
    assert 0.5 < fp8.seconds["LM head"] / plain.seconds["LM head"] < 0.7


def test_gathered_weights_by_mode():
    root, block = 2 * 128_256 * 4096 + 4096, 218_103_808 + 2 * 4096
    gathered = {
        mode: plan_of(gpus=4, sharding_mode=mode).memory["gathered, communication"]
        for mode in ("ddp", "fsdp_full", "fsdp_grad")
    }
    # Backward begins: the next block's weights, and what is sent and received of the last one's gradients.
    assert gathered == {
        "ddp": 0,
        "fsdp_full": 2 * (root + block) + 6 * block,
        "fsdp_grad": 2 * N8 + 6 * block,
    }
    across = plan_of(gpus=16, sharding_mode="ddp", grad_reduce_dtype="fp32")
    assert across.memory["gathered, communication"] == 4 * N8
    assert (
        plan_of(gpus=16, sharding_mode="ddp", grad_reduce_dtype="bf16").memory["gathered, communication"] == 0
    )


def test_accumulation_keeps_gradients_and_multiplies_the_work():
    one, four = (
        plan_of(gpus=8, sharding_mode="fsdp_full", gradient_accumulation_steps=n, **FP8) for n in (1, 4)
    )
    assert four.memory["gradients"] - one.memory["gradients"] == pytest.approx(4 * N8)
    assert four.seconds["linear layers"] == pytest.approx(4 * one.seconds["linear layers"])
    assert four.seconds["optimizer"] == one.seconds["optimizer"]


def test_recomputation_trades_memory_for_time():
    plain, recomputed = plan_of(**FP8), plan_of(**FP8, gradient_checkpointing=True)
    assert sum(recomputed.memory.values()) < sum(plain.memory.values())
    assert recomputed.seconds["linear layers"] == pytest.approx(4 / 3 * plain.seconds["linear layers"])


@pytest.mark.parametrize(
    "settings, traffic", [({}, 26), ({"moment_dtype": "bf16"}, 18), ({"master_weights": "none"}, 22)]
)
def test_optimizer_traffic(settings, traffic):
    assert adam_bytes(plan_of(**settings).job) == traffic


@pytest.mark.parametrize("settings", [FP8, {"gradient_checkpointing": True}])
@pytest.mark.parametrize("model", ["meta-llama/Llama-3.2-1B", LLAMA_8B])
def test_the_largest_micro_batch_fits_and_one_more_does_not(model, settings):
    batch = plan_of(model, **settings).largest_batch
    assert plan_of(model, batch_size=batch, **settings).fits
    assert not plan_of(model, batch_size=batch + 1, **settings).fits


def test_the_8b_fills_an_h200_and_does_not_fit_an_h100():
    assert plan_of(**FP8).largest_batch == 1
    small = plan_of(**FP8, gpu="H100")
    assert small.largest_batch == 0 and not small.fits
    assert sum(peak(small.job).values()) > room(small.gpu)
    assert room(GPUS["H200"]) == pytest.approx(148.1e9)  # 2 GB are no tensors'


def test_rates_days_and_cost_by_hand(capsys):
    plan = plan_of(gpus=8, sharding_mode="fsdp_grad", **FP8)
    assert plan.tokens_per_second == pytest.approx(8 * 8192 / plan.step)
    assert plan.days(1e12) == pytest.approx(1e12 / (8 * 8192 / plan.step) / 86_400)
    # 51.47 GFLOP a token (training/tracking/metrics.py).
    assert plan.tflops == pytest.approx(51.47e-3 * 8192 / plan.step, rel=1e-3)
    flags = "--batch_size 1 --max_seq_length 8192 --use_te --mixed_precision fp8 --sharding_mode fsdp_grad"
    money = "--tokens 1e12 --price_per_gpu_hour 2.5"
    assert main(f"--model_name {LLAMA_8B} {flags} --gpus 8 {money}".split()) == 0
    cost = f"{plan.days(1e12) * 24 * 8 * 2.5:,.0f}"
    assert re.search(rf"\| {plan.days(1e12):,.1f} +\| {re.escape(cost)} +\|", capsys.readouterr().out)


def test_bytes_that_travel():
    gradients_fp32 = {"gpus": 16, "gpus_per_node": 8}
    within = {
        mode: exchange(plan_of(gpus=8, sharding_mode=mode).job).within / N8 for mode in ("ddp", "fsdp_full")
    }
    assert within == {"ddp": 4, "fsdp_full": 6}
    assert exchange(plan_of(sharding_mode="fsdp_grad", gpus=8).job).within == 4 * N8
    assert exchange(plan_of(sharding_mode="fsdp_full", **gradients_fp32).job).within == 8 * N8
    assert exchange(plan_of().job).within == 0
    # 1/8 of a gradient in FP32, reduced among the copies: twice its bytes.
    assert exchange(plan_of(sharding_mode="hsdp", **gradients_fp32).job).across == N8


def test_a_ring_within_a_node_by_hand():
    job = plan_of(gpus=8, sharding_mode="ddp").job
    wire = 4 * N8 * 7 / 8 / (450e9 * 0.75)
    assert communication_seconds(job, GPUS["H200"], 50e9) == pytest.approx(wire)


def test_hsdp_spares_a_slow_network():
    work = {"gpus": 64, "gradient_accumulation_steps": 4, **FP8}
    full, hybrid = (plan_of(sharding_mode=m, network_gbs=5.0, **work) for m in ("fsdp_full", "hsdp"))
    assert hybrid.step < full.step
    assert plan_of(sharding_mode="fsdp_full", **work).step < full.step


def test_rings_among_copies_have_hops_by_hand():
    # 8 copies, each on the 8 GPUs of a node: a card sends 1/8 of the gradient, in FP32 and twice, 7 hops far,
    # which takes longer than the 8 bytes a parameter within a node; 32 layers, 2 collectives.
    job = plan_of(gpus=64, sharding_mode="hsdp").job
    network = N8 * 7 / 8 / 5e9
    assert network > 8 * N8 * 7 / 8 / (450e9 * 0.75)
    assert communication_seconds(job, GPUS["H200"], 5e9) == pytest.approx(network + 7 * 32 * 2 * 10e-6)


def test_a_ring_across_nodes_by_hand():
    # 8 bytes a parameter, 7 of 8 nodes' worth over the 8 cards of a node; 7 hops, 32 layers, 3 collectives.
    job = plan_of(gpus=64, sharding_mode="fsdp_full").job
    wire = 8 * N8 * 7 / 8 / (8 * 5e9) + 7 * 32 * 3 * 10e-6
    assert communication_seconds(job, GPUS["H200"], 5e9) == pytest.approx(wire)
    # Within a node everything but that travels again over its links, here the busier of the two.
    links = 8 * N8 * 7 / 8 / (450e9 * 0.75) + 7 * 32 * 3 * 10e-6
    assert communication_seconds(job, GPUS["H200"], 500e9) == pytest.approx(links)


def test_more_gpus_are_never_faster_each_and_shards_shrink():
    plans = [plan_of(gpus=n, sharding_mode="fsdp_full", **FP8) for n in (8, 64, 512, 4096)]
    each = [plan.tokens_per_second / plan.job.gpus for plan in plans]
    assert each == sorted(each, reverse=True)
    totals = [sum(plan.memory.values()) for plan in plans]
    assert totals == sorted(totals, reverse=True)


def test_auto_takes_what_training_takes():
    assert plan_of().job.mode == "single"
    assert plan_of(gpus=8).job.mode == "fsdp_grad"  # docs/multi_gpu.md: from 1 B parameters on, if it fits
    assert plan_of("tiny-llama", gpus=8, max_seq_length=1024).job.mode == "ddp"
    assert plan_of("meta-llama/Llama-3.1-405B", gpus=8).job.mode == "fsdp_offload"


IN_FP8 = FP8 | {"fp8_scenario": "current", "sharding_mode": "fsdp_full", "fp8_all_gather": True}


def test_zero_and_fp8_weights_are_stepped_by_a_slower_adamw():
    suites, zero = (plan_of(gpus=8, sharding_mode=mode) for mode in ("fsdp_grad", "ds_zero1"))
    fp8 = plan_of(gpus=8, **IN_FP8)
    assert [plan.job.slow_adam for plan in (suites, zero, fp8)] == [False, True, True]
    assert zero.seconds["optimizer"] > suites.seconds["optimizer"]


def test_one_gpu_has_nothing_to_gather_in_fp8():
    alone, plain = plan_of(**IN_FP8), plan_of(**IN_FP8 | {"fp8_all_gather": False})
    assert (alone.memory, alone.seconds) == (plain.memory, plain.seconds)


def test_offloading_takes_of_the_hosts_what_training_counts():
    flags = "--model_name meta-llama/Llama-3.1-8B --use_te --gpu H200 --gpus 2 --sharding_mode"
    params = read_model(LLAMA_8B).parameters / 1e9
    for mode, kept, saved in (("fsdp_offload", 16, 4), ("ds_zero3_offload", 20, 12)):
        told = f"{kept * params:.0f} GB in the memory of each node's CPUs, {saved * params:.0f} more while"
        assert told in run([*flags.split(), mode])
    bf16 = ["fsdp_offload", "--master_weights", "none", "--moment_dtype", "bf16"]
    assert f"{8 * params:.0f} GB in the memory" in run([*flags.split(), *bf16])  # as training takes it


def test_what_is_offloaded_without_need_is_told():
    """Training's `auto` leaves room for activations that it does not know; a plan knows them."""
    flags = "--use_te --mixed_precision fp8 --batch_size 1 --max_seq_length 4096 --gradient_checkpointing"
    flags = f"--model_name meta-llama/Llama-3.1-70B {flags} --gpu H200 --gpus 8".split()
    text, sharded = run(flags), run([*flags, "--sharding_mode", "fsdp_full"])
    told = re.search(
        r"8 GPUs: by this plan --sharding_mode fsdp_full fits too, (.*) GB a GPU, and .* ([\d,]+) ms", text
    )
    row = next(line for line in sharded.splitlines() if "fsdp_full" in line)
    assert all(f"| {value} " in row for value in told.groups())
    assert "fits too" not in run([*flags, "--sharding_mode", "fsdp_offload"])
    low = run([*flags[:-1], "4,64", "--moment_dtype", "bf16"])
    assert (
        "4 GPUs: training refuses --sharding_mode fsdp_offload: --moment_dtype bf16: torch AdamW keeps" in low
    )
    assert "64 GPUs: training refuses" not in low and "in the memory of each node" not in low


def ways(text):
    """What each number of GPUs would fit with: {GPUs: {flags: (GB, tokens/s)}}."""
    found, gpus = {}, None
    for line in text.splitlines():
        if head := re.fullmatch(r"([\d,]+) GPUs?: would fit with", line):
            gpus = found[head.group(1)] = {}
        elif way := re.match(r"- (--.*?): ([\d.]+) GB a GPU, ([\d,]+) tokens/s", line):
            gpus[way.group(1)] = way.groups()[1:]
    return found


def test_what_does_not_fit_is_told_what_would():
    flags = "--use_te --mixed_precision fp8 --batch_size 1 --max_seq_length 8192 --gradient_checkpointing"
    flags = f"--model_name meta-llama/Llama-3.1-405B {flags} --gpus 48,64,96".split()
    text = run(flags)
    found = ways(text)
    assert list(found) == ["64"]  # where `auto`, which knows no activations, takes fsdp_full
    assert list(found["64"]) == ["--moment_dtype bf16", "--sharding_mode fsdp_offload"]  # the fastest first
    assert re.search(r"--sharding_mode fsdp_offload: .* 812 GB in the memory of each node's CPUs", text)
    for way, numbers in found["64"].items():
        row = next(line for line in run([*flags, *way.split()]).splitlines() if line.startswith("| 64 "))
        assert "does not fit" not in row and all(f"| {number} " in row for number in numbers)


@pytest.mark.parametrize(
    "flags, told",
    [
        ("--batch_size 1000 --gpus 1", ["--batch_size 8"]),  # the largest that fits
        ("--batch_size 1 --max_seq_length 131072 --gpus 8", ["--gradient_checkpointing"]),
        ("--batch_size 8 --max_seq_length 131072 --gpus 8", ["--batch_size 1 --gradient_checkpointing"]),
        (
            "--batch_size 1 --max_seq_length 8192 --gpus 8 --sharding_mode hsdp --hsdp_shard_size 1",
            [
                "--sharding_mode fsdp_full without --hsdp_shard_size",
                "--grad_reduce_dtype bf16",
                "--moment_dtype bf16",
                "--sharding_mode fsdp_offload without --hsdp_shard_size",
            ],
        ),
    ],
)
def test_only_what_suffices_is_advised(flags, told):
    text = run(f"--model_name {LLAMA_8B} --use_te --mixed_precision fp8 {flags}".split())
    assert [list(found) for found in ways(text).values()] == [told]


def test_where_nothing_helps_it_is_said_once():
    flags = "--model_name meta-llama/Llama-3.1-405B --use_te --batch_size 1 --max_seq_length 131072"
    text = run([*flags.split(), "--gpus", "1,64"])
    assert text.count("does not fit, not even with") == 1 and not ways(text)
    assert "1 GPU, 64 GPUs: does not fit, not even with --batch_size, --gradient_checkpointing" in text


def test_a_folder_is_read_as_its_preset(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["Qwen/Qwen3-8B"]))
    assert read_model(str(tmp_path)) == read_model("Qwen/Qwen3-8B")


NO_SIZES = {"num_attention_heads": 0, "hidden_size": "64"}


@pytest.mark.parametrize(
    "content",
    [
        '{"model_type": "llama"}',
        "[]",
        "{",
        '{"model_type": "mixtral"}',
        '{"model_type": ["llama"]}',
        *(
            json.dumps(PRESETS["meta-llama/Llama-3.2-1B"] | broken)
            for broken in (
                NO_SIZES | {"head_dim": None},
                {"num_hidden_layers": 0},
                {"num_hidden_layers": "2"},
                {"max_position_embeddings": "x"},
            )
        ),
    ],
)
def test_a_broken_folder_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match="--model_name"):
        read_model(str(tmp_path))


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--gpu MI300X", "RTX 5090.; give its --gpu_memory_gb, --bf16_tflops, --memory_tbs, --link_gbs"),
        (
            "--gpu MI300X --gpu_memory_gb 192 --bf16_tflops 1300 --fp8_tflops 2600",
            "--gpu MI300X: not known; give its --memory_tbs, --link_gbs$",
        ),
        (
            "--gpu MI300X --gpu_memory_gb 192 --bf16_tflops 1300",
            "--link_gbs .and --fp8_tflops, if it has FP8",
        ),
        ("--gpu A100 --mixed_precision fp8", "--fp8_tflops"),
        ("--mixed_precision fp8 --use_te --fp8_scenario mxfp8", "--gpu H200: needs one of B200"),
        ("--mixed_precision fp8 --use_te --fp8_scenario block --gpu L40S", "--gpu L40S: needs one of H100"),
        (
            "--mixed_precision fp8 --use_te --fp8_scenario mxfp8 --gpu 'RTX 5090'",
            "RTX 5090: needs one of B200",
        ),
        (
            "--mixed_precision fp8 --use_te --fp8_scenario block --fp8_fp32_scales --gpu B200",
            "--fp8_fp32_scales --gpu B200: needs one of H100",
        ),
        ("--use_te --deterministic --no_flash_attention", "--deterministic --no_flash_attention: packed"),
        ("--mixed_precision fp32", "--mixed_precision fp32: plans cover"),
        ("--precision_map layers.0=bf16", "--precision_map"),
        (
            "--mixed_precision fp8 --use_te --bf16_first_layers 32",
            "--bf16_last_layers 0: .*model's 3 layers",
        ),
        ("--mixed_precision bf16 --use_te --bf16_last_layers 1", "are for --mixed_precision fp8"),
        ("--use_te --mixed_precision bf16 --fp8_lm_head", "--fp8_lm_head --mixed_precision bf16: .*drop one"),
        ("--use_te --mixed_precision fp8 --fp8_attention", "--fp8_attention: plans cover"),
        ("--gpus 0", "--gpus: '0'"),
        ("--gpus 8,x", "--gpus: 'x'"),
        ("--gpuss 8", "unknown flag --gpuss; did you mean '--gpus'"),
        ("--batch_siz 8", "unknown flag --batch_siz; did you mean '--batch_size'"),
        ("--token_budget 1e9", "unknown flag --token_budget; --help and train_fp8.py --help"),
        ("--tokens inf", "--tokens: inf: must be a positive number"),
        ("--price_per_gpu_hour 3", "needs --tokens"),
        ("--model_name no/such", "--model_name no/such: .*presets: te_models/presets.py"),
        ("--model_name llama-3.1-8b", r"did you mean .meta-llama/Llama-3\.1-8B.\?"),
        ("--model_name meta-llama/Llama-3-70B", r"did you mean .meta-llama/\S+-70B.\?"),
        ("--sharding_mode hsdp --gpus 12", "does not divide the 12 GPUs .* give another"),
        ("--sharding_mode ds_zero2 --moment_dtype bf16 --gpus 8", "--sharding_mode ds_zero2"),
        (
            "--sharding_mode fsdp_offload --moment_dtype bf16 --gpus 8",
            "--sharding_mode fsdp_offload: --moment_dtype bf16: torch AdamW",
        ),
        ("--use_te --te_backend emulated --mixed_precision fp8", "--te_backend emulated"),
        ("--check --batch_size 1", "--check takes no other flags, got --batch_size"),
        ("--check --tokens 5", "--check takes no other flags, got --tokens"),
        ("--check no_such_folder", "--check no_such_folder"),
    ],
)
def test_bad_input_is_one_clear_line(flags, says, capsys):
    assert main(shlex.split(flags)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert re.search(says, error)


@pytest.mark.parametrize(
    ("changes", "flags", "says"),
    [
        ({"rms_norm_eps": "1e-5"}, {"use_te": True}, "--model_name .*its config.json: .*rms_norm_eps"),
        ({"attention_bias": True}, {"use_te": True}, "--use_te .*attention_bias=True.*without --use_te$"),
        ({"intermediate_size": 8200}, FP8, "intermediate_size 8200 not a multiple of 16"),
        ({"vocab_size": 32001}, FP8 | {"fp8_lm_head": True}, "vocabulary 32001 not a multiple of 16"),
        ({}, FP8 | {"fp8_scenario": "current", "fp8_margin": 2}, "--fp8_margin 2: applies to delayed"),
        ({}, {"mixed_precision": "fp8", "fp8_fast_accumulation": True}, "not to tensorwise"),
    ],
)
def test_a_precision_that_training_refuses_is_not_planned(tmp_path, changes, flags, says):
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["meta-llama/Llama-3.2-1B"] | changes))
    cfg = config_from_dict({"model_name": str(tmp_path)} | flags)
    with pytest.raises(ValueError, match=says):
        make_plan(cfg, GPUS["H200"], gpus=1)


def test_a_sequence_that_training_refuses_is_not_planned():
    cfg = config_from_dict({"model_name": LLAMA_8B, "max_seq_length": 131_073})
    with pytest.raises(ValueError) as refused:
        data.check(cfg.data, PRESETS[LLAMA_8B]["max_position_embeddings"])
    with pytest.raises(ValueError, match=re.escape(str(refused.value))):
        plan_of(max_seq_length=131_073)
    assert plan_of(max_seq_length=131_072, gpus=8)


@pytest.mark.parametrize("fields, plans", [({}, False), ({"use_sliding_window": False}, True)])
def test_attention_within_a_window_is_planned_up_to_its_length(tmp_path, fields, plans):
    config = PRESETS["mistralai/Mistral-7B-v0.3"] | {"sliding_window": 4096} | fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ["--model_name", str(tmp_path), "--gpus", "8", "--max_seq_length"]
    assert main([*flags, "4096"]) == 0
    assert main([*flags, "4097"]) == (0 if plans else 2)


def test_small_models_and_small_costs_are_no_zeros():
    text = run(["--model_name", "tiny-llama", "--gpus", "1", "--tokens", "1e9", "--price_per_gpu_hour", "3"])
    assert text.startswith("2.30 million parameters")
    plan = plan_of("tiny-llama", batch_size=8, max_seq_length=1024, use_te=False)
    assert text.splitlines()[4].endswith(f"| {plan.days(1e9) * 24 * 3:.2g}  |")


def test_an_unknown_gpu_is_planned_from_its_flags():
    own = "--gpu MI300X --gpu_memory_gb 205 --bf16_tflops 1307 --fp8_tflops 2614"
    own += " --memory_tbs 5.3 --link_gbs 448"
    text = run(f"{own} --model_name {LLAMA_8B} --gpus 1,8 --use_te --mixed_precision fp8".split())
    assert "205 GB a GPU" in text
    assert "120 GB a GPU" in run(["--gpu", "NVIDIA H200", "--gpu_memory_gb", "120", "--gpus", "1"])


@pytest.mark.parametrize(
    "flag, code, says",
    [("--help", 0, "--price_per_gpu_hour"), ("--batch_siz", 2, "unknown flag --batch_siz")],
)
def test_help_and_wrong_flags_are_answered_before_torch_is_imported(flag, code, says):
    command = f"import sys; sys.modules['torch'] = None; sys.argv = ['plan', '{flag}']; " + (
        "import runpy; runpy.run_module('benchmarks.plan', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code and says in done.stdout + done.stderr


def test_the_command_runs_as_it_is_documented():
    command = [
        sys.executable,
        "-m",
        "benchmarks.plan",
        "--model_name",
        "meta-llama/Llama-3.1-405B",
        "--gpus",
        "8,512",
    ]
    done = subprocess.run([*command, "--gpu", "h200"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "405.85 billion parameters" in done.stdout and "does not fit" in done.stdout
