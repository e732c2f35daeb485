"""Records of real benchmark runs, and the page's tables from records with ratios worked out by hand."""

import json
import re
import shlex
from pathlib import Path

import pytest

from benchmarks import throughput
from benchmarks.pages import performance_page
from benchmarks.pages.performance_page import BEGIN, END, README_BEGIN
from benchmarks.throughput import COUNTED, RESULTS, Schedule, main, parse, record

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Of two runs on a CPU: BF16, Hugging Face layers."""
    folder = tmp_path_factory.mktemp("throughput")
    results = folder / "new" / "records.jsonl"
    flags = "--model_name tiny-llama --max_seq_length 72 --batch_size 2 --gradient_accumulation_steps 2"
    own = f"--steps 16 --repeats 2 --results {results} --output_dir {folder}"
    assert main(shlex.split(f"{flags} --num_workers 0 --num_proc 1 {own}")) == 0
    return folder


@pytest.fixture(scope="module")
def measured(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "new" / "records.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("accumulation", "interval", "warmup", "least", "default", "least_profiled", "profiled"),
    [
        (1, 8, 8, 16, 40, 24, 3),
        (2, 4, 8, 12, 24, 16, 1),
        (3, 2, 6, 8, 14, 10, 1),
        (8, 1, 5, 6, 9, 9, 1),
        (64, 1, 5, 6, 9, 9, 1),
    ],
)
def test_an_interval_is_eight_micro_batches(
    accumulation, interval, warmup, least, default, least_profiled, profiled
):
    plain, watched = (Schedule.of(accumulation, profile) for profile in (False, True))
    assert (plain.interval, plain.warmup, plain.profiled) == (interval, warmup, 0)
    assert (plain.steps(1), plain.steps(COUNTED)) == (least, default)
    assert (watched.steps(1), watched.profiled) == (least_profiled, profiled)


def test_the_schedule_is_that_of_a_run():
    from training.tracking import meter, profiling

    assert throughput.WARMUP == meter.WARMUP_STEPS
    assert profiling.profiled_steps(3, done=0, total=40)[0] == throughput.PROFILED_FROM


def test_each_repeat_is_a_record_of_its_own(measured):
    assert [(found["repeat"], found["repeats"]) for found in measured] == [(1, 2), (2, 2)]
    for found in measured:
        assert (found["model_name"], found["num_layers"], found["max_seq_length"]) == ("tiny-llama", 3, 72)
        assert (found["batch_size"], found["gradient_accumulation_steps"], found["gpus"]) == (2, 2, 1)
        assert (found["mixed_precision"], found["recipe"], found["requested_recipe"]) == ("bf16",) * 3
        assert (found["use_te"], found["packing"], found["sharding_mode"]) == (False, True, "single")
        assert (found["moment_dtype"], found["master_weights"]) == ("fp32", "fp32")
        assert found["gpu_name"] is found["peak_memory_gb"] is found["mfu_bf16"] is found["mfu_fp8"] is None
        assert found["seconds_to_first_step"] > 0 and 0 < found["data_wait_share"] < 1
        assert found["steps"] == 16 and found["dataset"] == "synthetic" and found["versions"]["torch"]
        assert found["command"].startswith("python -m benchmarks.throughput --model_name tiny-llama")
        assert found["date"].startswith("20") and "commit" in found
        assert found["settings"]["max_seq_length"] == 72


def test_every_synthetic_row_is_full_and_flops_are_those_of_the_formula(measured):
    layer = 2 * 256 * 4 * 64 + 2 * 256 * 2 * 64 + 3 * 256 * 512  # q and o, k and v, the MLP
    per_token = 6 * (3 * layer + 256 * 2048) + 6 * 3 * 4 * 64 * 72
    for found in measured:
        rate = found["tokens_per_second_per_gpu"]
        assert rate == found["padded_tokens_per_second_per_gpu"] == found["useful_tokens_per_second"] > 0
        assert found["model_tflops_per_gpu"] * 1e12 == pytest.approx(rate * per_token, rel=1e-9)


def test_no_synthetic_row_is_seen_twice(folder):
    last = json.loads((folder / "run-2" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["step"], last["train/epoch"]) == (16, 1.0)


CONFIG = {
    **{"max_seq_length": 64, "batch_size": 3, "gradient_accumulation_steps": 2, "packing": False},
    **{"moment_dtype": "bf16", "master_weights": "fp32", "profile_steps": 3},
}
ENVIRONMENT = {
    **{"git": None, "python": "3.12", "cuda": "13.0", "cudnn": 91900, "driver": "580", "date": "2026-01-02"},
    **{"versions": {"torch": "2.11.0"}, "attention_backend": "fused"},
}
SUMMARY = {
    **{"emulated": False, "world_size": 4, "tokens_per_second": 1000.0, "padded_tokens_per_second": 1600.0},
    **{"model_name": "m", "mixed_precision": "fp8", "use_te": True, "recipe": "delayed", "mfu_fp8": 0.25},
}
PROFILE = {"steps": 3, "step_ms": 5.0, "kinds": {"GEMM": {"ms": 4.0, "launches": 2}}, "kernels": ["long"]}


def run_folder(folder: Path, **summary) -> Path:
    files = {"config": CONFIG, "env": ENVIRONMENT, "summary": SUMMARY | summary, "profile": PROFILE}
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


def test_a_record_is_per_gpu_and_has_the_profile_by_kind(tmp_path):
    found = record(run_folder(tmp_path), "abc")
    assert (found["tokens_per_second_per_gpu"], found["padded_tokens_per_second_per_gpu"]) == (250.0, 400.0)
    assert found["useful_tokens_per_second"] == 1000.0
    assert found["profile"] == {"steps": 3, "step_ms": 5.0, "kinds": {"GEMM": {"ms": 4.0, "launches": 2}}}
    assert (found["commit"], found["moment_dtype"], found["packing"]) == ("abc", "bf16", False)
    assert found["versions"] == {"torch": "2.11.0", "python": "3.12", "cuda": "13.0"}
    assert record(tmp_path, None)["commit"] is None


def test_an_emulated_run_is_not_recorded(tmp_path):
    with pytest.raises(RuntimeError, match="emulated"):
        record(run_folder(tmp_path, emulated=True), None)


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ("--max_steps 3", 2, "--max_steps 3: the benchmark sets it itself; use --steps"),
        ("--eval_samples 3", 2, "--eval_samples 3: the benchmark sets it itself; leave it out"),
        ("--steps 15", 2, "--steps 15: the first 8 are not counted; give 16 or more"),
        ("--steps 23 --profile", 2, "give 24 or more"),
        ("--gpus 0", 2, "--gpus 0: must be at least 1"),
        ("--batch_siz 3", 2, "unknown flag --batch_siz; did you mean '--batch_size'"),
        ("--batch_size 0", 2, "--batch_size 0: must be at least 1"),
        ("--tokenizer_name other", 2, "--tokenizer_name other: synthetic text is made of the demo"),
        ("--use_te --te_backend emulated", 1, "--te_backend emulated: this is emulated"),
        ("--use_te", 1, "--use_te or --mixed_precision fp8 without a CUDA GPU is emulated"),
        ("--mixed_precision fp8", 1, "without a CUDA GPU is emulated"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path, capsys, monkeypatch, flags, code, message):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([*shlex.split(flags), "--results", str(tmp_path / "records.jsonl")]) == code
    assert message in capsys.readouterr().err and not (tmp_path / "records.jsonl").exists()


def test_a_cpu_does_not_get_into_the_tables(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    before = RESULTS.read_bytes()
    assert main(["--max_seq_length", "64", "--batch_size", "1"]) == 1
    assert "this machine has no CUDA GPU; give another file" in capsys.readouterr().err
    assert RESULTS.read_bytes() == before


def test_a_run_that_fails_leaves_no_record_and_its_exit_code(tmp_path):
    results = tmp_path / "records.jsonl"
    flags = f"--model_name /nowhere --steps 16 --repeats 2 --results {results}"
    assert main(shlex.split(flags)) == 2 and not results.exists()


def test_results_that_cannot_be_written_are_refused_before_anything_runs(tmp_path, capsys):
    flags = f"--steps 16 --max_seq_length 64 --batch_size 1 --results {tmp_path}"
    assert main(shlex.split(flags)) == 2
    assert f"--results {tmp_path}: cannot be written to (Is a directory)" in capsys.readouterr().err


def test_a_recorded_command_keeps_its_commit_and_no_secret():
    commit, key = "0123456789abcdef0123456789abcdef01234567", "a" * 40
    command = f"python -m benchmarks.throughput --commit {commit} --wandb_run_name {key}"
    kept = throughput.without_secrets(command, commit)
    assert kept == command.replace(key, "***") and throughput.without_secrets(kept, None).count("***") == 2


def test_documented_commands_parse():
    text = (ROOT / "docs" / "performance.md").read_text() + throughput.__doc__
    commands = re.findall(r"python -m benchmarks\.throughput (--(?:[^\n]*\\\n)*[^\n]*)", text)
    assert len(commands) >= 2
    for command in commands:
        arguments, given = parse(shlex.split(command.replace("\\\n", "")))
        assert arguments.repeats == 3 and given["use_te"] is True


def line(rate: float, **values) -> dict:
    """A record of one H200; 8B at 8192 in FP8 unless `values` say otherwise."""
    settings = values.pop("settings", {})
    return {
        **{"gpu_name": "NVIDIA H200", "gpus": 1, "model_name": "org/8B", "num_layers": 32},
        **{"max_seq_length": 8192, "dataset": "synthetic", "batch_size": 1, "use_te": True},
        **{"gradient_accumulation_steps": 4, "sharding_mode": "single", "moment_dtype": "fp32"},
        **{"master_weights": "fp32", "packing": True, "mixed_precision": "fp8", "recipe": "delayed"},
        **{"tokens_per_second_per_gpu": rate, "padded_tokens_per_second_per_gpu": rate},
        **{"model_tflops_per_gpu": rate / 20, "mfu_bf16": 0.5, "mfu_fp8": 0.25, "peak_memory_gb": 100.0},
        **{"data_wait_share": 0.001, "seconds_to_first_step": 12.0, "date": "2026-01-02T03:04:05+00:00"},
        **{"versions": {"torch": "2.11.0"}, "commit": "0123456789abcdef", "dirty": False},
        "settings": {"model_name": "org/8B", "use_te": True, **settings},
        **values,
    }


BF16 = {"mixed_precision": "bf16", "recipe": "bf16"}
PEER = {
    "stack": "transformers + torchao",
    "date": "2026-01-03T00:00:00+00:00",
    "settings": {
        **{"model_name": "org/8B", "num_layers": 32, "max_seq_length": 8192, "batch_size": 1},
        **{"precision": "tensorwise", "gradient_checkpointing": False, "no_compile": False},
    },
    **{"gpu": "NVIDIA H200", "versions": {"torch": "2.11.0", "torchao": "0.17.0"}, "peak_memory_gb": 70.0},
    **{"tokens_per_second": 11000.0, "model_tflops": 560.0, "mfu_bf16": 0.56},
}
HAND = f"# Title\n\nby hand {{}}\n\n{BEGIN}\nold\n{END}\n\nalso by hand\n"


def write(tmp_path, lines, peers=()) -> str:
    """The page made of these records."""
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(found) + "\n" for found in lines))
    (tmp_path / "peers").mkdir()
    for i, peer in enumerate(peers):
        (tmp_path / "peers" / f"peer-{i}.json").write_text(json.dumps(peer))
    page = tmp_path / "page.md"
    page.write_text(HAND)
    (tmp_path / "readme.md").write_text(HAND.replace(BEGIN, README_BEGIN))
    assert regenerate(tmp_path) == 0
    return page.read_text()


def regenerate(tmp_path) -> int:
    names = {"throughput": "records.jsonl", "peers": "peers", "page": "page.md", "readme": "readme.md"}
    return performance_page.main([f"--{flag}={tmp_path / name}" for flag, name in names.items()])


def cells(page: str) -> list[dict[str, str]]:
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def test_a_row_has_the_medians_of_its_runs_and_its_ratio_to_bf16(tmp_path):
    runs = [line(rate) for rate in (15000.0, 16000.0, 18000.0)]
    runs += [line(rate, **BF16) for rate in (9900.0, 10000.0, 10300.0)]
    runs += [line(5.0, batch_size=2), line(12000.0, **BF16, use_te=False), line(9000.0, commit="older")]
    runs.insert(0, runs.pop())  # of the row that follows, by an earlier commit
    page = write(tmp_path, runs, [PEER, PEER | {"tokens_per_second": 12000.0}])
    fp8, bf16, other_batch, hugging_face, peer = cells(page)
    assert (fp8["precision"], fp8["batch"]) == ("FP8 delayed, TE layers", "1 x 4")
    assert (fp8["tokens/s per GPU"], fp8["TFLOP/s"], fp8["runs"]) == ("16,000", "800", "3")
    assert (fp8["against BF16"], bf16["against BF16"], other_batch["against BF16"]) == ("1.60x", "1.00x", "-")
    assert hugging_face["precision"] == "BF16, HF layers" and hugging_face["against BF16"] == "1.00x"
    assert fp8["MFU of BF16 / FP8 peak"] == "50.0% / 25.0%" and fp8["data wait"] == "0.10%"
    assert fp8["optimizer state"] == "FP32 masters, FP32 moments" and "mode" not in fp8 and "rows" not in fp8
    assert (peer["stack"], peer["tokens/s per GPU"], peer["runs"]) == (
        "transformers + torchao",
        "11,500",
        "2",
    )
    assert (peer["batch"], peer["against BF16"]) == ("1 x 1", "-")
    assert "### org/8B, 32 layers, 8,192 tokens, synthetic data, 1 x NVIDIA H200" in page
    assert "2026-01-02 to 2026-01-03, torch 2.11.0, torchao 0.17.0, commit 0123456789ab." in page


def test_a_row_is_held_against_bf16_of_its_own_commit_where_that_was_run(tmp_path):
    runs = [line(9000.0, **BF16, commit="older"), line(10000.0, **BF16)]
    runs += [line(13500.0, commit="older"), line(16000.0, settings={"fp8_fast_accumulation": True})]
    runs += [line(17000.0, commit="oldest", settings={"fp8_attention": True})]
    bf16, older, newer, oldest = cells(write(tmp_path, runs))
    assert (bf16["tokens/s per GPU"], bf16["runs"]) == ("10,000", "1")
    assert [row["against BF16"] for row in (older, newer, oldest)] == ["1.50x", "1.60x", "1.70x"]


def test_a_run_of_unknown_code_is_no_newer_than_the_last(tmp_path):
    (row,) = cells(write(tmp_path, [line(1.0, commit=None), line(2.0)]))
    assert (row["tokens/s per GPU"], row["runs"]) == ("2", "1")


def test_padded_rows_are_the_baseline_of_packed_ones(tmp_path):
    hugging_face = BF16 | {"use_te": False, "padded_tokens_per_second_per_gpu": 25.0}
    padded = line(10.0, **hugging_face, packing=False)
    slower = line(8.0, **hugging_face, packing=False, settings={"gradient_checkpointing": True})
    faster = line(20.0, **hugging_face)
    packed = line(31.0, settings={"fp8_attention": True, "learning_rate": 1e-4, "batch_size": 1})
    above, between, other, below = cells(write(tmp_path, [padded, slower, faster, packed]))
    assert [row["against BF16"] for row in (above, between, other)] == ["1.00x", "0.80x", "1.00x"]
    assert other["against padded BF16, HF layers"] == "2.00x"
    assert (above["rows"], above["tokens/s per GPU"], above["with padding"]) == ("padded", "10", "25")
    assert (below["rows"], below["against BF16"]) == ("packed", "-")
    assert below["against padded BF16, HF layers"] == "3.10x"
    assert below["options"] == "`--fp8_attention --learning_rate=0.0001`"


def test_each_shape_has_its_table_and_each_profile_its_line(tmp_path):
    profile = {"steps": 3, "step_ms": 5.0, "kinds": {"GEMM": {"ms": 4.0}, "idle": {"ms": 0.5}}}
    page = write(tmp_path, [line(1.0), line(2.0, gpus=8, profile=profile, sharding_mode="fsdp_grad")])
    assert page.count("### org/8B") == 2 and "8 x NVIDIA H200" in page and "`fsdp_grad`" in page
    assert "- FP8 delayed, TE layers: 5.0 (GEMM 4.0, idle 0.5)" in page


def test_many_gpus_are_held_against_one_of_the_same_settings(tmp_path):
    alone = [line(rate) for rate in (900.0, 1000.0, 1100.0)]
    others = [line(5000.0, batch_size=2), line(3000.0, **BF16), line(2000.0, settings={"optimizer": "x"})]
    many = line(950.0, gpus=4, sharding_mode="fsdp_full")
    unmatched = line(940.0, gpus=4, sharding_mode="ddp", moment_dtype="bf16")
    newer = line(1250.0, commit="newer")  # than the code that ran on four
    one, four = write(tmp_path, [*alone, *others, many, unmatched, newer]).split("### org/8B")[1:]
    assert "scaling" not in cells(one)[0]
    assert [row["scaling"] for row in cells(four)] == ["95.0%", "-"]


def test_readme_has_the_fastest_of_each_stack_and_precision(tmp_path):
    runs = [line(rate) for rate in (15000.0, 16000.0)] + [line(17000.0, settings={"fp8_attention": True})]
    runs += [line(10000.0, **BF16), line(11000.0, **BF16, use_te=False), line(60000.0, gpus=4)]
    write(tmp_path, [*runs, line(5.0, max_seq_length=1024)], [PEER, PEER | {"tokens_per_second": 12000.0}])
    rows = cells((tmp_path / "readme.md").read_text())
    assert [(row["stack"], row["precision"], row["tokens/s"]) for row in rows] == [
        ("this suite", "FP8 delayed, TE layers", "17,000"),
        ("transformers + torchao", "FP8 tensorwise", "11,500"),
        ("this suite", "BF16, HF layers", "11,000"),
        ("this suite", "FP8 delayed, TE layers", "5"),
    ]
    assert rows[0]["against BF16"] == "1.70x" and rows[0]["micro-batch x accumulation"] == "1 x 4"
    assert [row["model, tokens a sequence"] for row in rows] == ["8B, 8,192"] * 3 + ["8B, 1,024"]


def test_the_ratio_in_readme_is_never_to_padded_rows_of_other_layers(tmp_path):
    padded = line(10.0, **BF16, use_te=False, packing=False)
    write(tmp_path, [padded, line(31.0)])
    rows = cells((tmp_path / "readme.md").read_text())
    assert [row["against BF16"] for row in rows] == ["-", "1.00x"]


def test_what_is_written_by_hand_survives(tmp_path):
    page = write(tmp_path, [line(1.0)])
    before, after = HAND.split(f"{BEGIN}\nold\n{END}")
    assert page.startswith(before) and page.endswith(after) and "old" not in page
    assert regenerate(tmp_path) == 0 and (tmp_path / "page.md").read_text() == page


@pytest.mark.parametrize(
    "broken", ["", BEGIN, f"{END}\n{BEGIN}", f"{BEGIN}{BEGIN}{END}", f"{BEGIN}{END}{END}"]
)
def test_a_page_without_its_markers_is_left_alone(tmp_path, capsys, broken):
    write(tmp_path, [line(1.0)])
    (tmp_path / "page.md").write_text(broken)
    assert regenerate(tmp_path) == 2 and "must hold these two lines once" in capsys.readouterr().err
    assert (tmp_path / "page.md").read_text() == broken


def test_broken_and_missing_records_are_named(tmp_path, capsys):
    write(tmp_path, [line(1.0)])
    (tmp_path / "records.jsonl").write_text(json.dumps(line(1.0)) + "\n{half")
    assert regenerate(tmp_path) == 2 and "records.jsonl:2: cannot be read" in capsys.readouterr().err
    (tmp_path / "records.jsonl").unlink()
    assert regenerate(tmp_path) == 2 and "no measurement there" in capsys.readouterr().err


def test_the_committed_page_has_its_markers():
    for path, begin in ((performance_page.PAGE, BEGIN), (performance_page.README, README_BEGIN)):
        assert "made" in performance_page.replaced(path.read_text(), "made", path, begin)


@pytest.mark.gpu
def test_a_profiled_fp8_run_is_recorded(tmp_path):
    from training.precision.te_runtime import why_not_te

    if reason := why_not_te():
        pytest.skip(reason)
    results = tmp_path / "records.jsonl"
    flags = "--model_name tiny-llama --max_seq_length 256 --batch_size 2 --use_te --mixed_precision fp8"
    assert main(shlex.split(f"{flags} --steps 24 --profile --results {results} --commit abc")) == 0
    (found,) = [json.loads(text) for text in results.read_text().splitlines()]
    assert found["recipe"] == "delayed" and found["gpu_name"] and found["peak_memory_gb"] > 0
    assert found["profile"]["kinds"]["GEMM"]["ms"] > 0 and found["commit"]
