"""benchmarks.compare: a comparison that is killed, stopped and resumed; its verdict; its errors."""

import io
import json
import re
import shlex
import signal
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from fp8_suite.benchmarks.compare import main as module
from fp8_suite.benchmarks.compare.jobs import build_jobs, check_before_start
from fp8_suite.benchmarks.compare.main import main, parse, read_runs, run_jobs
from fp8_suite.benchmarks.compare.verdict import conclude, exit_code, write_verdict
from fp8_suite.benchmarks.records.launch import Outcome
from fp8_suite.benchmarks.records.variants import given_settings, parse_variants
from fp8_suite.core.errors import UserError
from fp8_suite.core.files import to_json

from tests.benchmarks.folders import launch_here
from tests.children import running

ROOT = Path(__file__).resolve().parents[2]


# A real comparison


def losses(folder: Path) -> dict[int, float]:
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def wait_for(condition, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


HELD = """
import runpy, sys, time
from fp8_suite.training.trainer import Trainer

step = Trainer._before_step

def held(trainer, *args):
    while trainer.progress.step and not trainer.stop.requested:
        time.sleep(0.02)
    return step(trainer, *args)

Trainer._before_step = held
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# A comparison whose runs wait after their first step for a signal.
COMPARE = f"""
import runpy, sys
from fp8_suite.benchmarks.records import launch

command = launch.command
launch.command = lambda *args: [sys.executable, "-uc", {HELD!r}, *command(*args)[2:]]
runpy.run_module("benchmarks.compare", run_name="__main__")
"""


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison that is stopped in its first run, and resumed: folder and (exit code, output) of both."""
    folder = tmp_path_factory.mktemp("compared")
    given = (
        f"--variants bf16,delayed --noise_seeds 0 --max_loss_gap 50 --output_dir {folder} "
        "--num_of_samples 60 --max_seq_length 128 --batch_size 2 --eval_samples 4 --num_workers 0 "
        "--num_proc 1 --max_steps 20 --learning_rate 1e-3 --save_interval 0"
    ).split()
    bf16, output = folder / "runs/bf16", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output):
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(module, "launch", launch_here)
        line = [sys.executable, "-c", COMPARE, *given]
        with running(line, cwd=ROOT, stdout=-1, stderr=-2) as first:
            wait_for(lambda: losses(bf16) or first.poll() is not None)
            first.send_signal(signal.SIGTERM)
            stopped, _ = first.communicate(timeout=300)
        resumed = main(given)
    return folder, (first.returncode, stopped), (resumed, output.getvalue())


def test_a_stopped_comparison_saves_and_ends_with_75(compared):
    folder, (code, output), _ = compared
    assert code == 75 and output.endswith("interrupted in bf16; run the same command to resume\n"), output
    assert "[2/2]" not in output and "run folder" in (folder / "logs/bf16.log").read_text()


def test_the_same_command_resumes_and_ends_in_a_verdict(compared):
    folder, _, (code, output) = compared
    assert code == 0, output
    assert f"{folder}/runs/bf16/checkpoints/step_" in output, "resumed from its checkpoint"
    verdict = json.loads((folder / "verdict.json").read_text())
    rows = {row["variant"]: row for row in verdict["variants"]}
    assert [row["status"] for row in rows.values()] == ["REFERENCE", "PASS"]
    tail = {}
    for name in rows:
        found = losses(folder / "runs" / name)
        assert sorted(found) == list(range(1, 21))
        tail[name] = (found[19] + found[20]) / 2  # 10 % of 20
    assert rows["delayed"]["values"]["gap"] == pytest.approx(100 * (tail["delayed"] / tail["bf16"] - 1))
    assert (folder / "loss.png").exists()


def test_an_emulated_comparison_shows_losses_and_no_speed(compared):
    page = (compared[0] / "verdict.md").read_text()
    assert (
        page.startswith("# FP8 against BF16 (emulated)") and "EMULATED: bf16, delayed. TE layers or" in page
    )
    head = page.splitlines()[2]
    assert "token accuracy" in head
    assert not any(word in head for word in ("tokens/s", "TFLOP", "MFU", "GB", "hours", "speed"))


# Comparisons of written runs


def jobs_of(folder, variants="bf16,delayed,current", seeds=0, paired=0, flags="--max_steps 20"):
    return build_jobs(parse_variants([variants]), given_settings(flags.split(), "p"), folder, seeds, paired)


H200 = {"gpu_name": "NVIDIA H200", "versions": {"torch": "2.11.0"}, "git": None}


def write(job, loss, *, start=8.0, summary=None, environment=None, change=None, **config):
    """A finished run of 20 steps on a GPU, with the tail loss `loss`; `change` edits the lines of its log."""
    job.folder.mkdir(parents=True, exist_ok=True)
    settings = job.cfg.to_dict()
    lines = [{"step": 0, "eval/loss": start}]
    values = [9.0] * 18 + [loss - 0.1, loss + 0.1]
    lines += [{"step": step, "train/loss": value} for step, value in enumerate(values, 1)]
    lines = change(lines) if change else lines
    known = {name: settings[name] for name in ("use_te", "mixed_precision")}
    known |= {"recipe": "bf16" if settings["mixed_precision"] == "bf16" else settings["fp8_scenario"]}
    known |= {"steps": 20, "label_tokens": 5000, "eval_label_tokens": 300, "eval_loss": 2.5, "world_size": 1}
    known |= {"tokens_per_second": 1000.0, "gpu_hours": 0.5, "gpus": 1, "emulated": False}
    (job.folder / "settings.json").write_text(json.dumps(settings | config))
    (job.folder / "env.json").write_text(json.dumps(H200 | (environment or {})))
    (job.folder / "metrics.jsonl").write_bytes(b"\n".join(map(to_json, lines)))
    (job.folder / "summary.json").write_text(json.dumps(known | (summary or {})))


def write_all(jobs, *runs):
    """Write all jobs, with the given losses or 2.0."""
    for job, loss in zip(jobs, runs or [2.0] * len(jobs), strict=True):
        write(job, loss)
    return jobs


def judged(jobs, failed=None, price=None, max_loss_gap=0.5):
    failed = failed or {}
    return conclude(jobs, read_runs(jobs, failed), failed, max_loss_gap=max_loss_gap, price=price)


def diverging(lines):
    return [*lines[:-1], lines[-1] | {"train/loss": float("nan")}]


def test_a_verdict_has_gaps_noise_speed_and_cost(tmp_path):
    jobs = write_all(jobs_of(tmp_path, seeds=2), 2.0, 2.012, 2.008, 1.98, 2.03)
    write(jobs[1], 2.012, summary={"tokens_per_second": 1250.0, "eval_loss": 2.55})
    result, rows = judged(jobs, price=3.0)
    assert {row.variant: row.status for row in rows} == {
        "bf16": "REFERENCE",
        "delayed": "FAIL",
        "current": "PASS",
    }
    delayed = rows[1].values
    assert delayed["gap"] == pytest.approx(0.6) and rows[2].values["gap"] == pytest.approx(0.4)
    assert delayed["eval_gap"] == pytest.approx(2.0) and delayed["speedup"] == pytest.approx(1.25)
    assert delayed["cost"] == pytest.approx(1.5)
    assert result["noise_band_percent"] == pytest.approx((-1.0, 1.5)), "it includes the reference"
    assert not any("compare equal layers" in note for note in result["notes"])
    assert any(note == "delayed: FAIL, although its gap is inside the noise band" for note in result["notes"])
    assert exit_code(rows, {}, strict=False) == 1
    write_verdict(result, rows, tmp_path, "the command")
    row = next(line for line in (tmp_path / "verdict.md").read_text().splitlines() if "| delayed" in line)
    assert all(text in row for text in ("FAIL", "2.0120", "+0.60 %", "1,250", "1.25x", "1.50"))


def test_gaps_over_paired_seeds_are_means(tmp_path):
    """Gaps of +1.0 %, 0 and +0.2 % to BF16 of the same seed; BF16 itself moves by 5 %."""
    jobs = jobs_of(tmp_path, "bf16,delayed", seeds=1, paired=2)
    assert [(job.name, job.against, job.seed_of, job.cfg.optim.seed) for job in jobs] == [
        ("bf16", None, None, 42),
        ("delayed", "bf16", None, 42),
        ("bf16-seed43", None, "bf16", 43),
        ("delayed-seed43", "bf16-seed43", "delayed", 43),
        ("bf16-seed44", None, "bf16", 44),
        ("delayed-seed44", "bf16-seed44", "delayed", 44),
    ]
    by_seed = {42: {}, 43: {"label_tokens": 5003, "eval_loss": 2.6}, 44: {"label_tokens": 4998}}
    for job, loss in zip(jobs, (2.0, 2.02, 2.1, 2.1, 2.05, 2.0541), strict=True):
        write(job, loss, start=job.cfg.optim.seed / 5, summary=by_seed[job.cfg.optim.seed])
    result, rows = judged(jobs)
    assert rows[1].status == "PASS" and result["noise_band_percent"] == pytest.approx((0.0, 5.0))
    gaps = [rows[1].values[name] for name in ("gap", "gap_low", "gap_high", "eval_gap")]
    assert gaps == pytest.approx([0.4, 0.0, 1.0, 0.0], abs=1e-6) and rows[1].values["tail_loss"] == 2.02
    assert any("Gaps are means over the seeds 42, 43, 44;" in note for note in result["notes"])
    _, (_, row) = judged(jobs, max_loss_gap=0.1)
    reason = "its loss is 0.40 % above bf16's (mean of 3 seeds), more than --max_loss_gap 0.1 %"
    assert (row.status, row.reason) == ("FAIL", reason)
    failed = {"delayed-seed44": Outcome(1, tmp_path, "it broke")}
    result, (_, row) = judged(jobs, failed)
    assert row.values["gap"] == pytest.approx(0.5) and exit_code([row], failed, strict=False) == 1
    assert "delayed-seed44: not in the mean, it broke (exit code 1)" in result["notes"]
    assert any("Gaps are means over the seeds 42, 43;" in note for note in result["notes"])
    write(jobs[-1], float("nan"), start=44 / 5, summary={"label_tokens": 4998})
    assert judged(jobs)[1][1].reason == "its last training loss is not finite"


def section(folder, name):
    body = re.search(rf'<section id="{name}">.*?</section>', (folder / "report.html").read_text(), re.DOTALL)[
        0
    ]
    return " ".join(re.sub(r"<.*?>", " ", body).split())


def finished(folder, variants, *flags):
    """Run the command on written runs, which are finished."""
    own = f"--variants {variants} --noise_seeds 0 --max_steps 20 --price_per_gpu_hour 3 --output_dir {folder}"
    return main([*own.split(), *flags])


def test_the_page_begins_with_the_verdict_and_shows_each_gap(tmp_path):
    """tensorwise is 0.65 % above its baseline bf16_hf, and below bf16."""
    write_all(jobs_of(tmp_path, "bf16,bf16_hf,tensorwise", paired=1), 2.1, 2.0, 2.013, 2.1, 2.0, 2.02)
    assert finished(tmp_path, "bf16,bf16_hf,tensorwise", "--paired_seeds", "1") == 1
    assert re.search(r'<section id="(\w+)"', (tmp_path / "report.html").read_text())[1] == "verdict"
    verdict = section(tmp_path, "verdict")
    assert "tensorwise FAIL bf16_hf 2.0130 +0.82 % +0.65 % +1.00 %" in verdict
    assert "more than --max_loss_gap 0.5 %" in verdict and "cost" in verdict
    gap = section(tmp_path, "gap")
    assert "tensorwise bf16_hf +0.650%" in gap and "tensorwise-seed43 bf16_hf-seed43 +1.000%" in gap


def test_a_reference_that_diverges_leaves_curves_and_no_verdict(tmp_path, capsys):
    jobs = write_all(jobs_of(tmp_path, "bf16,delayed"))
    (tmp_path / "verdict.json").touch()
    write(jobs[0], 2.0, change=diverging)
    assert finished(tmp_path, "bf16,delayed") == 2
    assert "the reference's last training loss is not finite" in capsys.readouterr().err
    assert (tmp_path / "loss.png").exists() and not (tmp_path / "verdict.json").exists()
    assert "the last loss of the baseline is not finite" in section(tmp_path, "gap")


def test_a_reference_that_breaks_ends_the_comparison_with_its_curves(tmp_path, monkeypatch, capsys):
    job, _ = write_all(jobs_of(tmp_path, "bf16,delayed"))
    (job.folder / "summary.json").unlink()
    monkeypatch.setattr(module, "launch", lambda cfg, **_: Outcome(-9, Path("x")))
    assert finished(tmp_path, "bf16,delayed") == 1
    assert "the reference bf16 failed: killed by SIGKILL" in capsys.readouterr().err
    assert (tmp_path / "loss.png").exists() and (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset_name": "other"}, "it has --dataset_name other instead of demo"),
        ({"batch_size": 4}, "sequences per step 4 instead of 8"),
        ({"summary": {"steps": 10}}, "steps 10 instead of 20"),
        ({"summary": {"label_tokens": 4999}}, "label_tokens 4999 instead of 5000"),
        ({"seed": 43}, "--seed 43 instead of 42"),
        ({"start": 8.1}, "evaluation loss before the first step 8.1 instead of 8.0"),
        ({"learning_rate": 1e-4}, "--learning_rate 0.0001 instead of 1e-05"),
        (
            {"environment": {"data": {"train": {"fingerprint": "2e"}, "eval": None}}},
            "train samples 2e instead of 1f",
        ),
        (
            {"change": lambda lines: lines[:12]},
            "delayed/metrics.jsonl: ends at step 11 of 20; delete the run folder",
        ),
    ],
)
def test_runs_of_different_experiments_are_not_compared(tmp_path, changes, message):
    bf16, delayed = jobs_of(tmp_path, "bf16,delayed")
    write(bf16, 2.0, environment={"data": {"train": {"fingerprint": "1f"}, "eval": None}})
    write(delayed, 2.0, **changes)
    with pytest.raises(UserError, match=re.escape(message)):
        judged([bf16, delayed])


def test_equal_weights_of_the_same_precision_must_score_the_same(tmp_path):
    """0.5 % is within what FP8 changes of an untrained model's loss, and not within BF16's own difference."""
    for variants, same in (("bf16,delayed", False), ("bf16,bf16+moment_dtype=bf16", True)):
        jobs = write_all(jobs_of(tmp_path / variants[5:7], variants))
        write(jobs[1], 2.0, start=8.04)
        if same:
            with pytest.raises(UserError, match="evaluation loss before the first step"):
                judged(jobs)
        else:
            judged(jobs)


def test_what_follows_from_a_seed_or_the_split_of_a_batch_may_differ(tmp_path):
    jobs = write_all(jobs_of(tmp_path, "bf16,delayed+batch_size=2+gradient_accumulation_steps=4", seeds=1))
    write(jobs[2], 2.0, start=8.5, summary={"label_tokens": 4000, "eval_label_tokens": 200})
    assert [row.status for row in judged(jobs)[1]] == ["REFERENCE", "PASS"]
    pair = write_all(jobs_of(tmp_path / "b", "bf16,delayed", paired=1))
    write(pair[-1], 2.0, summary={"label_tokens": 4000})
    with pytest.raises(
        UserError,
        match=r"delayed-seed43 cannot be compared with bf16-seed43: .*label_tokens 4000 instead of 5000",
    ):
        judged(pair)


@pytest.mark.parametrize(
    ("variants", "against"),
    [
        ("tensorwise,delayed,bf16_hf,bf16", ["bf16_hf", "bf16", "bf16", None]),
        ("bf16,tensorwise,delayed", [None, "bf16", "bf16"]),
        ("bf16_hf,tensorwise", [None, "bf16_hf"]),
    ],
)
def test_each_variant_s_baseline_has_its_layers_if_possible(tmp_path, variants, against):
    jobs = write_all(jobs_of(tmp_path, variants))
    by_name = {job.name: job for job in jobs}
    assert [by_name[name].against for name in variants.split(",")] == against and jobs[0].against is None
    notes = [note for note in judged(jobs)[0]["notes"] if "compare equal layers" in note]
    assert [note.split()[0] for note in notes] == (
        ["tensorwise"] if "delayed" in variants and "hf" not in variants else []
    )


@pytest.mark.parametrize(
    ("outcome", "status", "reason"),
    [
        (Outcome(1, Path("/nowhere"), "no such cores"), "SKIPPED", "no such cores (exit code 1)"),
        (
            Outcome(2, Path("/nowhere"), "--precision_map x: no"),
            "FAIL",
            "--precision_map x: no (exit code 2)",
        ),
        (
            Outcome(-9, Path("/nowhere"), None, "step 3"),
            "FAIL",
            "killed by SIGKILL; last output: step 3",
        ),
    ],
)
def test_a_variant_that_does_not_run_is_skipped_or_fails(tmp_path, outcome, status, reason):
    jobs = jobs_of(tmp_path, "bf16,nvfp4")
    write(jobs[0], 2.0)
    failed = {"nvfp4": outcome}
    result, rows = judged(jobs, failed)
    assert rows[1].status == status and f"nvfp4: {status}, {reason}" in result["notes"]
    assert exit_code(rows, failed, strict=False) == int(status == "FAIL")
    assert exit_code(rows, failed, strict=True) == 1


def test_losses_that_are_not_finite_fail_and_make_no_noise_band(tmp_path):
    jobs = write_all(jobs_of(tmp_path, "bf16,delayed,current", seeds=2), 2.0, 2.0, 2.0, 2.02, 2.5)
    write(jobs[1], 2.0, change=diverging)
    write(jobs[2], 2.0, summary={"eval_loss": "NaN"})
    write(jobs[4], 2.0, change=diverging)
    result, rows = judged(jobs)
    assert [row.reason for row in rows[1:]] == [
        "its last training loss is not finite",
        "its evaluation loss is not finite",
    ]
    assert result["noise_band_percent"] == pytest.approx((0.0, 1.0)) and result["seeds"] == [42, 43]
    assert "bf16-seed44: not in the noise band, its last training loss is not finite" in result["notes"]
    write_verdict(result, rows, tmp_path, "the command")
    text = (tmp_path / "verdict.json").read_text()
    assert not re.search(r": (NaN|-?Infinity)", text), "strict JSON"
    result, rows = judged(
        jobs, failed := {name: Outcome(1, tmp_path, "it broke") for name in ("bf16-seed43", "bf16-seed44")}
    )
    assert result["noise_band_percent"] is None and exit_code(rows[:1], failed, strict=False) == 1
    assert any(note.startswith("No noise band: BF16 finished with one seed") for note in result["notes"])


@pytest.mark.parametrize("summary", [{"emulated": True}, {"gpus": 0}])
def test_speed_of_emulated_runs_and_on_a_cpu_is_left_out(tmp_path, summary):
    jobs = write_all(jobs_of(tmp_path, "bf16,mxfp8+te_backend=emulated"))
    write(jobs[1], 2.0, summary=summary | {"peak_memory_gb": 9.0, "mfu_fp8": 0.1})
    result, (_, row) = judged(jobs, price=3.0)
    assert row.status == "PASS" and row.values["gap"] == pytest.approx(0)
    assert result["emulated"] == ("emulated" in summary)
    for name in ("tokens_per_second", "mfu_fp8", "peak_memory_gb", "gpu_hours", "cost", "speedup"):
        assert row.values[name] is None


@pytest.mark.parametrize(("passes", "noted"), [(0.9, False), (3.7, True)])
def test_repeated_data_is_noted(tmp_path, passes, noted):
    jobs = jobs_of(tmp_path, "bf16,delayed")
    for job in jobs:
        write(job, 2.0, change=lambda lines: [*lines, {"step": 20, "train/epoch": passes}])
    notes = [note for note in judged(jobs)[0]["notes"] if "epochs" in note]
    assert [("3.7 epochs" in note) for note in notes] == [True] * noted


@pytest.mark.parametrize("flags", ["--noise_seeds -1", "--max_loss_gap nan", "--max_loss_gap -1", "--gpus 0"])
def test_numbers_below_their_minimum_and_nan_are_refused(tmp_path, flags):
    argv = f"--variants bf16,delayed --output_dir {tmp_path} {flags}"
    with pytest.raises(UserError, match=f"{flags}.*: must be at least "):
        parse(argv.split())


def test_incomparable_runs_are_refused_before_anything_runs(tmp_path):
    with pytest.raises(UserError, match=r"delayed.* and bf16 cannot be compared: --batch_size x .* 4 and 8"):
        check_before_start(jobs_of(tmp_path, "bf16,delayed+batch_size=4"), 1)
    with pytest.raises(UserError, match="--global_batch_size 16: cannot be shared by 3 ranks; use 15"):
        check_before_start(jobs_of(tmp_path, flags="--global_batch_size 16"), 3)
    with pytest.raises(UserError, match="--grad_reduce_dtype fp8: one device exchanges no gradients"):
        check_before_start(jobs_of(tmp_path, flags="--grad_reduce_dtype fp8"), 1)
    split = "bf16,delayed+batch_size=auto,current+batch_size=2"
    check_before_start(jobs_of(tmp_path, split, flags="--global_batch_size 16"), 2)
    jobs = jobs_of(tmp_path, "bf16,delayed")
    write(jobs[0], 2.0)
    check_before_start(jobs, 1)
    with pytest.raises(UserError, match=r"--gpus 2: .*bf16 holds a run on 1 GPU;"):
        check_before_start(jobs, 2)
    write(jobs[0], 2.0, environment={"world_size": 4})
    (jobs[0].folder / "summary.json").unlink()  # a run that was stopped
    with pytest.raises(UserError, match=r"--gpus 1: .*bf16 holds a run on 4 GPUs"):
        check_before_start(jobs, 1)


def test_a_variant_that_failed_is_not_repeated_with_other_seeds(tmp_path, monkeypatch):
    jobs, started = jobs_of(tmp_path, "bf16,nvfp4", paired=1), []

    def launch(cfg, *, gpus, log):
        started.append(Path(cfg.checkpoint.output_dir).name)
        return Outcome(2 if "nvfp4" in started[-1] else 0, Path(cfg.checkpoint.output_dir), "no such cores")

    monkeypatch.setattr(module, "launch", launch)
    failed = run_jobs(jobs, gpus=1, folder=tmp_path)
    assert list(failed) == ["nvfp4"] and started == ["bf16", "nvfp4", "bf16-seed43"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--variants bf16,curent", "unknown variant; did you mean 'current'?"),
        ("--variants delayed", "--variants delayed: needs bf16 or bf16_hf"),
        ("--variants bf16,bf16", "two variants have the same name or run folder"),
        ("--variants bf16,delayed+seed=3", "a variant must not change seed"),
        ("--variants bf16,delayed+nope=3", "a variant must not change nope"),
        (
            "--variants bf16,delayed --use_te",
            "--use_te: python -m benchmarks.compare sets this for every run",
        ),
        ("--variants bf16,delayed --lerning_rate 1", "unknown flag --lerning_rate; did you mean"),
        (
            "--variants bf16,delayed --max_loss_gp 1",
            "unknown flag --max_loss_gp; did you mean '--max_loss_g",
        ),
        ("--variants bf16,delayed --model_name tiny-lama", "did you mean 'tiny-llama'?"),
        ("--variants bf16,delayed --dataset_name no.jsonl", "--dataset_name no.jsonl: no such file"),
        ("--variants bf16,delayed+sharding_mode=deepspeed+deepspeed_config=x.json", "x.json: no such file"),
        ("--variants bf16,current+fp8_margin=1", "variant current+fp8_margin=1: --fp8_margin 1: applies to"),
        ("--variants bf16,delayed+precision_map=proj=bf6", "did you mean 'bf16'?"),
        ("--variants bf16,block --fp8_margin 1", "variant block: --fp8_margin 1"),
        ("--variants bf16 --output_dir=", "--output_dir: '' is no folder; give a path"),
        ("--variants bf16 --output_dir=/dev/null/out", "Not a directory"),
        ("--variants bf16 --gpus 0", "--gpus 0: must be at least 1"),
        ("--variants bf16 --max_steps 0", "--max_steps 0: nothing is trained"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, flags, message):
    assert main([*f"--output_dir {tmp_path / 'out'}".split(), *flags.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_files_of_something_else_are_kept(tmp_path, capsys):
    (tmp_path / "verdict.md").write_text("mine")
    assert main(["--variants", "bf16", "--model_name", "tiny-llama", "--output_dir", str(tmp_path)]) == 2
    assert "holds verdict.md of something else" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["verdict.md"]


def test_the_documented_command_works(tmp_path):
    page = (ROOT / "docs" / "compare.md").read_text()
    args, training = parse(shlex.split(page.split("```")[1].replace("\\\n", " "))[3:])
    jobs = build_jobs(
        parse_variants(args.variants), given_settings(training, "p"), tmp_path, args.noise_seeds
    )
    assert [job.name for job in jobs][:3] == ["bf16", "delayed", "current"] and len(jobs) == 6 + 2
    assert jobs[0].cfg.log.eval_at_start and not jobs[0].cfg.checkpoint.export, "a comparison's defaults"
