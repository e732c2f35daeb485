"""benchmarks.compare: a comparison stopped and gone on with, its verdict's numbers, what it refuses."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.compare.main import (
    build_jobs,
    check_before_the_start,
    conclude,
    exit_code,
    main,
    parse,
    read_runs,
    run_jobs,
    write_verdict,
)
from benchmarks.records.launch import Outcome, _workers, is_finished, to_flags
from benchmarks.records.variants import VARIANTS, given_settings, parse_variants
from benchmarks.report import gaps
from training.config import config_from_dict, parse_config

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "--num_of_samples 60 --max_seq_length 128 --batch_size 2 --eval_samples 20 --num_workers 0 --num_proc 1 "
    "--learning_rate 1e-3 --max_steps 10 --save_interval 0"
)


def losses(folder: Path) -> dict[int, float]:
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison stopped by SIGTERM in its second run, and the same command again: (folder, outputs)."""
    folder = tmp_path_factory.mktemp("compared")
    flags = f"--variants bf16,delayed --noise_seeds 1 --max_loss_gap 3 --output_dir {folder} {TINY}"
    command = [sys.executable, "-m", "benchmarks.compare", *shlex.split(flags)]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.monotonic() + 120
    while not losses(folder / "runs" / "delayed") and time.monotonic() < deadline and first.poll() is None:
        time.sleep(0.02)
    first.send_signal(signal.SIGTERM)
    stopped, _ = first.communicate(timeout=120)
    reached = max(losses(folder / "runs" / "delayed"), default=0), first.returncode
    again = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    return folder, stopped, reached, again


def test_a_stopped_comparison_says_so_and_saves(compared):
    _, output, (step, code), _ = compared
    assert code == 75, output
    assert 1 <= step < 10
    assert "stopped in delayed; to go on: the same command" in output
    assert "[3/3]" not in output


def test_the_same_command_goes_on_and_ends_in_a_verdict(compared):
    folder, _, (step, _), again = compared
    assert again.returncode == 0, again.stdout + again.stderr
    assert "[1/3] bf16: finished already" in again.stdout
    assert f"resumed from {folder}/runs/delayed/checkpoints/step_{step:06d} at step {step}" in again.stdout
    assert (folder / "logs" / "bf16.log").read_text().count("$ ") == 1
    assert (folder / "logs" / "delayed.log").read_text().count("$ ") == 2
    assert all(sorted(losses(run)) == list(range(1, 11)) for run in (folder / "runs").iterdir())
    verdict = json.loads((folder / "verdict.json").read_text())
    rows = {row["variant"]: row for row in verdict["variants"]}
    assert [row["status"] for row in rows.values()] == ["REFERENCE", "PASS"]
    tail = {name: losses(folder / "runs" / name)[10] for name in (*rows, "bf16-seed43")}  # 10 % of 10
    assert rows["delayed"]["values"]["gap"] == pytest.approx(100 * (tail["delayed"] / tail["bf16"] - 1))
    noise = 100 * (tail["bf16-seed43"] / tail["bf16"] - 1)
    assert verdict["noise_band_percent"] == pytest.approx([min(0, noise), max(0, noise)])
    assert verdict["seeds"] == [42, 43] and (folder / "loss.png").exists()


def test_an_emulated_comparison_shows_losses_and_no_speed(compared):
    folder, *_ = compared
    page = (folder / "verdict.md").read_text()
    assert (
        page.startswith("# FP8 against BF16 (emulated)") and "EMULATED: bf16, delayed. TE's layers or" in page
    )
    head = page.splitlines()[2]
    assert "token accuracy" in head
    assert not any(word in head for word in ("tokens/s", "TFLOP", "MFU", "GB", "hours", "speed"))


def jobs_of(
    folder: Path,
    variants: str = "bf16,delayed,current",
    seeds: int = 0,
    flags: str = "--max_steps 20",
    paired: int = 0,
):
    return build_jobs(parse_variants([variants]), given_settings(flags.split(), "p"), folder, seeds, paired)


H200 = {"gpu_name": "NVIDIA H200", "versions": {"torch": "2.11.0"}, "git": None}


def write_run(job, loss: float, *, start: float = 8.0, summary=None, **config) -> None:
    """A finished run of 20 steps on a GPU, whose last two losses have the mean `loss`."""
    folder = Path(job.cfg.checkpoint.output_dir)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(job.cfg.to_dict() | config))
    (folder / "env.json").write_text(json.dumps(H200))
    values = [9.0] * 18 + [loss - 0.1, loss + 0.1]
    lines = [{"step": 0, "eval/loss": start}]
    lines += [{"step": step, "train/loss": value} for step, value in enumerate(values, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings = job.cfg.to_dict()
    known = {name: settings[name] for name in ("use_te", "mixed_precision")}
    known |= {"recipe": "bf16" if settings["mixed_precision"] == "bf16" else settings["fp8_scenario"]}
    known |= {"steps": 20, "label_tokens": 5000, "eval_label_tokens": 300, "eval_loss": 2.5, "world_size": 1}
    known |= {"tokens_per_second": 1000.0, "gpu_hours": 0.5, "gpus": 1, "emulated": False}
    (folder / "summary.json").write_text(json.dumps(known | (summary or {})))


def judged(jobs, failed=None, price=None):
    return conclude(jobs, read_runs(jobs, failed or {}), failed or {}, max_loss_gap=0.5, price=price)


def test_verdict_of_hand_made_runs(tmp_path):
    jobs = jobs_of(tmp_path, seeds=2)
    fast = {"tokens_per_second": 1250.0, "eval_loss": 2.55}
    for job, loss in zip(jobs, (2.0, 2.012, 2.008, 1.98, 2.03), strict=True):
        write_run(job, loss, summary=fast if job.name == "delayed" else None)
    result, rows = judged(jobs, price=3.0)
    assert [(row.variant, row.status) for row in rows] == [
        ("bf16", "REFERENCE"),
        ("delayed", "FAIL"),
        ("current", "PASS"),
    ]
    delayed = rows[1].values
    assert delayed["gap"] == pytest.approx(0.6) and rows[2].values["gap"] == pytest.approx(0.4)
    assert delayed["eval_gap"] == pytest.approx(2.0) and delayed["speedup"] == pytest.approx(1.25)
    assert delayed["cost"] == pytest.approx(1.5)
    assert result["noise_band_percent"] == pytest.approx((-1.0, 1.5))
    assert not any("other layers" in note for note in result["notes"])
    assert any("inside BF16's noise band all the same" in note for note in result["notes"])
    assert exit_code(rows, {}, strict=False) == 1
    write_verdict(result, rows, tmp_path, "the command")
    row = next(line for line in (tmp_path / "verdict.md").read_text().splitlines() if "| delayed" in line)
    assert all(text in row for text in ("FAIL", "2.0120", "+0.60 %", "1,250", "1.25x", "1.50"))


def command(folder: Path, variants: str) -> list[str]:
    """What `compare` is told of the runs of `jobs_of`; those that `write_run` wrote are finished."""
    flags = f"--variants {variants} --noise_seeds 0 --max_steps 20 --price_per_gpu_hour 3"
    return [*flags.split(), "--output_dir", str(folder)]


def section(folder: Path, name: str) -> str:
    page = (folder / "report.html").read_text()
    return re.sub(r"<.*?>", " ", re.search(rf'<section id="{name}">.*?</section>', page, re.DOTALL)[0])


def test_the_page_begins_with_the_verdict_and_shows_its_gaps(tmp_path):
    """tensorwise is held against bf16_hf: 0.65 % above that, and below bf16."""
    for job, loss in zip(jobs_of(tmp_path, "bf16,bf16_hf,tensorwise"), (2.1, 2.0, 2.013), strict=True):
        write_run(job, loss)
    assert main(command(tmp_path, "bf16,bf16_hf,tensorwise")) == 1
    assert re.search(r'<section id="([\w-]+)"', (tmp_path / "report.html").read_text())[1] == "verdict"
    told = " ".join(section(tmp_path, "verdict").split())
    assert "tensorwise FAIL bf16_hf 2.0130 +0.65 %" in told
    assert "its loss is 0.65 % above bf16_hf&#x27;s, more than --max_loss_gap 0.5 %" in told
    assert "No noise band" in told and "cost" in told and "at most 0.5 % above" in told
    row = re.search(r"tensorwise\s+bf16_hf\s+(\S+)", section(tmp_path, "gap-to-the-reference"))
    assert row[1] == "+0.650%"


def test_the_page_shows_each_gap_that_a_mean_is_of(tmp_path):
    jobs = jobs_of(tmp_path, "bf16,delayed", paired=1)
    for job, loss in zip(jobs, (2.0, 2.016, 2.1, 2.1), strict=True):
        write_run(job, loss)
    assert main([*command(tmp_path, "bf16,delayed"), "--paired_seeds", "1"]) == 0
    assert "delayed PASS bf16 2.0160 +0.40 % +0.00 % +0.80 %" in " ".join(
        section(tmp_path, "verdict").split()
    )
    shown = " ".join(section(tmp_path, "gap-to-the-reference").split())
    assert "delayed bf16 +0.800%" in shown and "delayed-seed43 bf16-seed43 +0.000%" in shown


def test_a_reference_that_diverged_is_refused_with_its_curves(tmp_path, capsys):
    for job in (jobs := jobs_of(tmp_path, "bf16,delayed")):
        write_run(job, 2.0)
    assert main(command(tmp_path, "bf16,delayed")) == 0 and (tmp_path / "verdict.json").exists()
    rewrite_metrics(jobs[0], diverged)
    assert main(command(tmp_path, "bf16,delayed")) == 2
    assert "the reference's training loss does not end finite" in capsys.readouterr().err
    assert (tmp_path / "loss.png").exists() and not (tmp_path / "verdict.json").exists()
    assert "it does not end finite" not in section(tmp_path, "gap-to-the-reference")
    assert "that run does not end finite" in section(tmp_path, "gap-to-the-reference")


def test_a_reference_that_breaks_leaves_its_curves(tmp_path, monkeypatch):
    (job,) = jobs_of(tmp_path, "bf16")
    write_run(job, 2.0)
    folder = Path(job.cfg.checkpoint.output_dir)
    (folder / "summary.json").unlink()
    broken = Outcome(1, folder, "no finite loss", False)
    monkeypatch.setattr("benchmarks.compare.main.launch", lambda cfg, **_: broken)
    assert main(command(tmp_path, "bf16")) == 1
    assert (tmp_path / "loss.png").exists() and (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset_name": "other"}, "data (--dataset_name demo there, other here)"),
        ({"max_seq_length": 512}, "data (--max_seq_length 1024 there, 512 here)"),
        ({"batch_size": 4}, "global batch (sequences a step 8 there, 4 here)"),
        ({"summary": {"world_size": 2}}, "global batch (sequences a step 8 there, 16 here)"),
        ({"summary": {"steps": 10}}, "steps (steps 20 there, 10 here)"),
        ({"summary": {"label_tokens": 4999}}, "tokens (label_tokens 5000 there, 4999 here)"),
        ({"model_name": "tiny-qwen2"}, "weights (--model_name tiny-llama there, tiny-qwen2 here)"),
        ({"seed": 43}, "weights (--seed 42 there, 43 here)"),
        ({"start": 8.1}, "weights (evaluation loss before the first step 8.00000 there, 8.10000 here)"),
        ({"learning_rate": 1e-4}, "optimizer (--learning_rate 1e-05 there, 0.0001 here)"),
    ],
)
def test_runs_that_differ_are_not_compared(tmp_path, changes, message):
    bf16, delayed, current = jobs_of(tmp_path)
    write_run(bf16, 2.0)
    write_run(delayed, 2.0, **changes)
    write_run(current, 2.0)
    with pytest.raises(ValueError) as raised:
        judged([bf16, delayed, current])
    assert message in str(raised.value) and "delayed and bf16 cannot be compared" in str(raised.value)


def test_weights_of_the_same_precision_must_score_the_same(tmp_path):
    """0.5 % is what FP8 may change of an untrained model's loss, and ten times what BF16 differs by."""
    jobs = jobs_of(tmp_path, "bf16,bf16+moment_dtype=bf16")
    write_run(jobs[0], 2.0)
    write_run(jobs[1], 2.0, start=8.04)
    with pytest.raises(ValueError, match="evaluation loss before the first step"):
        judged(jobs)


def test_a_batch_may_be_split_otherwise_and_noise_runs_may_differ_by_their_seed(tmp_path):
    jobs = jobs_of(tmp_path, "bf16,delayed+batch_size=2+gradient_accumulation_steps=4", seeds=1)
    write_run(jobs[0], 2.0)
    write_run(jobs[1], 2.0)
    write_run(jobs[2], 2.0, start=8.5, summary={"label_tokens": 4000, "eval_label_tokens": 200})
    assert [row.status for row in judged(jobs)[1]] == ["REFERENCE", "PASS"]


def test_each_path_is_held_against_its_own_layers(tmp_path):
    def against(variants):
        return {job.name: job.against for job in jobs_of(tmp_path, variants)}

    both = against("tensorwise,delayed,bf16_hf,bf16")
    assert both == {"bf16": None, "tensorwise": "bf16_hf", "delayed": "bf16", "bf16_hf": "bf16"}
    assert against("bf16,tensorwise,delayed")["tensorwise"] == "bf16"
    assert against("bf16_hf,tensorwise") == {"bf16_hf": None, "tensorwise": "bf16_hf"}
    te = {job.name: job.cfg.model.use_te for job in jobs_of(tmp_path, "bf16,delayed,tensorwise")}
    assert te == {"bf16": True, "delayed": True, "tensorwise": False}
    assert not jobs_of(tmp_path, "bf16,tensorwise")[0].cfg.model.use_te
    both = jobs_of(tmp_path, "bf16,bf16_hf,tensorwise")
    assert [job.cfg.model.use_te for job in both] == [True, False, False]


@pytest.mark.parametrize(
    ("variants", "told"), [("bf16,delayed,tensorwise", True), ("bf16,tensorwise", False)]
)
def test_a_gap_over_other_layers_is_told(tmp_path, variants, told):
    jobs = jobs_of(tmp_path, variants)
    for job in jobs:
        write_run(job, 2.0)
    notes = [note for note in judged(jobs)[0]["notes"] if "other layers" in note]
    assert len(notes) == told and all(
        note.startswith("tensorwise has other layers than bf16") for note in notes
    )


def test_what_cannot_run_is_skipped_and_what_fails_fails(tmp_path):
    jobs = jobs_of(tmp_path, "bf16,nvfp4,block")
    write_run(jobs[0], 2.0)
    (tmp_path / "runs" / "block").mkdir()
    (tmp_path / "runs" / "block" / "config.json").write_text("{}")
    outcomes = {
        job.name: Outcome(1, Path(job.cfg.checkpoint.output_dir), "no such cores", False) for job in jobs[1:]
    }
    only_skipped = {"nvfp4": outcomes["nvfp4"]}
    result, rows = judged(jobs[:2], only_skipped)
    assert [row.status for row in rows] == ["REFERENCE", "SKIPPED"]
    assert "nvfp4: SKIPPED, no such cores (exit code 1)" in result["notes"]
    assert exit_code(rows, only_skipped, strict=False) == 0
    assert exit_code(rows, only_skipped, strict=True) == 1
    _, rows = judged(jobs, outcomes)
    assert [row.status for row in rows] == ["REFERENCE", "SKIPPED", "FAIL"]
    assert exit_code(rows, outcomes, strict=False) == 1


def test_a_variant_that_is_killed_before_it_says_anything_fails(tmp_path):
    jobs = jobs_of(tmp_path, "bf16,delayed")
    write_run(jobs[0], 2.0)
    folder = Path(jobs[1].cfg.checkpoint.output_dir)
    killed = {"delayed": Outcome(-9, folder, "step 11/60 | loss 5.0", False, told=False)}
    result, rows = judged(jobs, killed)
    assert rows[1].status == "FAIL" and exit_code(rows, killed, strict=False) == 1
    told = "delayed: FAIL, it was killed by SIGKILL; its log ends with: step 11/60 | loss 5.0"
    assert told in result["notes"]


def test_a_wrong_setting_of_a_variant_fails(tmp_path):
    jobs = jobs_of(tmp_path, "bf16,delayed")
    write_run(jobs[0], 2.0)
    wrong = Outcome(2, Path(jobs[1].cfg.checkpoint.output_dir), "--precision_map layers.99=bf16: no", False)
    _, rows = judged(jobs, {"delayed": wrong})
    assert rows[1].status == "FAIL"


def test_the_same_name_may_have_held_other_rows(tmp_path):
    jobs = jobs_of(tmp_path, "bf16,delayed", seeds=1)
    for job, fingerprint in zip(jobs, ("1f", "2e", "3d"), strict=True):
        write_run(job, 2.0)
        data = {"data": {"train": {"fingerprint": fingerprint}, "eval": None}}
        (Path(job.cfg.checkpoint.output_dir) / "env.json").write_text(json.dumps(H200 | data))
    with pytest.raises(ValueError, match=r"what the data holds \(train samples 1f there, 2e here\)"):
        judged(jobs)
    environment = Path(jobs[1].cfg.checkpoint.output_dir) / "env.json"
    environment.write_text(json.dumps(H200 | {"data": {"train": {"fingerprint": "1f"}, "eval": None}}))
    judged(jobs)  # another seed holds out other samples
    environment.write_text(json.dumps(H200 | {"data": {"train": {"fingerprint": "2e"}, "eval": None}}))
    reference, other, seed = read_runs(jobs, {}).values()
    assert gaps.why_not_comparable(seed, reference) is None
    why = gaps.why_not_comparable(other, reference)
    assert why == "its data held other samples than the reference's, though settings are the same"
    fewer = replace(other, config=other.config | {"num_of_samples": 7})
    assert gaps.why_not_comparable(fewer, reference) is None  # which the page tells as a setting


def rewrite_metrics(job, change) -> None:
    path = Path(job.cfg.checkpoint.output_dir) / "metrics.jsonl"
    lines = change([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("\n".join(map(json.dumps, lines)))


def test_gaps_are_over_the_steps_that_both_runs_logged(tmp_path):
    """Of one of them every second loss was logged: another tail, and no other loss."""
    jobs = jobs_of(tmp_path, "bf16,delayed")
    for job in jobs:
        write_run(job, 2.0)
        rewrite_metrics(
            job, lambda lines: [r | {"train/loss": 9 - 0.3 * r["step"]} for r in lines if r["step"]]
        )
    rewrite_metrics(jobs[0], lambda lines: [r for r in lines if r["step"] % 2 == 0])
    _, rows = judged(jobs)
    assert rows[1].values["gap"] == 0 and rows[1].values["tail_loss"] != rows[0].values["tail_loss"]


def test_a_run_whose_losses_are_cut_off_is_refused(tmp_path):
    jobs = jobs_of(tmp_path, "bf16,delayed")
    for job in jobs:
        write_run(job, 2.0)
    rewrite_metrics(jobs[1], lambda lines: lines[:12])
    with pytest.raises(ValueError, match=r"delayed.metrics\.jsonl: ends at step 11 of 20; remove its folder"):
        judged(jobs)


def diverged(lines: list[dict]) -> list[dict]:
    return [*lines[:-1], lines[-1] | {"train/loss": "NaN"}]


def test_a_run_that_ends_without_a_finite_loss_fails_whatever_it_had_before(tmp_path):
    jobs = jobs_of(tmp_path, "bf16,delayed")
    for job in jobs:
        write_run(job, 2.0)
    rewrite_metrics(jobs[1], diverged)
    _, rows = judged(jobs)
    assert (rows[1].status, rows[1].reason) == ("FAIL", "its training loss does not end finite")
    rewrite_metrics(jobs[0], diverged)
    with pytest.raises(ValueError, match=r"bf16: the reference's training loss does not end finite"):
        judged(jobs)


def test_a_seed_that_diverged_makes_no_noise_band(tmp_path):
    jobs = jobs_of(tmp_path, "bf16,delayed", seeds=2)
    for job, loss in zip(jobs, (2.0, 2.0, 2.02, 2.5), strict=True):
        write_run(job, loss)
    rewrite_metrics(jobs[-1], diverged)
    result, _ = judged(jobs)
    assert result["noise_band_percent"] == pytest.approx((0.0, 1.0)) and result["seeds"] == [42, 43]
    note = "bf16-seed44: not in the noise band, its training loss does not end finite"
    assert note in result["notes"]
    runs = read_runs(jobs, {})
    family = gaps.seed_runs(list(runs.values()), runs["bf16"])
    assert [run.name for run in family] == ["bf16", "bf16-seed43"]
    rewrite_metrics(jobs[-2], diverged)
    result, _ = judged(jobs)
    assert result["noise_band_percent"] is None
    assert any(line.startswith("No noise band: BF16 ended with one seed") for line in result["notes"])


def test_no_gap_is_a_share_of_a_loss_of_0(tmp_path, capsys):
    def to_0(lines: list[dict]) -> list[dict]:
        return [line | ({"train/loss": 0.0} if line["step"] > 10 else {}) for line in lines]

    jobs = jobs_of(tmp_path, "bf16,bf16_hf,tensorwise")
    for job in jobs:
        write_run(job, 2.0)
    assert [job.against for job in jobs[1:]] == ["bf16", "bf16_hf"]
    rewrite_metrics(jobs[1], to_0)
    _, rows = judged(jobs)
    assert rows[1].values["gap"] == pytest.approx(-100)
    assert rows[2].reason == "bf16_hf's training loss, which it is held against, ends at 0"
    rewrite_metrics(jobs[0], to_0)
    assert main(command(tmp_path, "bf16,bf16_hf,tensorwise")) == 2
    assert "bf16: the reference's training loss ends at 0, so" in capsys.readouterr().err
    assert "or a loss of 0 there" in section(tmp_path, "gap-to-the-reference")


def test_an_evaluation_that_is_no_number_fails_and_is_written_as_strict_json(tmp_path):
    jobs = jobs_of(tmp_path, "bf16,delayed")
    write_run(jobs[0], 2.0)
    write_run(jobs[1], 2.0, summary={"eval_loss": "NaN"})
    result, rows = judged(jobs)
    assert (rows[1].status, rows[1].reason) == ("FAIL", "its evaluation loss is not finite")
    write_verdict(result, rows, tmp_path, "the command")

    def refuse(constant):
        raise AssertionError(constant)

    json.loads((tmp_path / "verdict.json").read_text(), parse_constant=refuse)


def test_what_cannot_be_compared_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(ValueError, match=r"delayed.* and bf16 cannot be compared: --batch_size x .* 4 and 8"):
        check_before_the_start(jobs_of(tmp_path, "bf16,delayed+batch_size=4"), 1)
    jobs = jobs_of(tmp_path, "bf16,delayed")
    write_run(jobs[0], 2.0)
    check_before_the_start(jobs, 1)
    with pytest.raises(ValueError, match=r"bf16: holds a run on 1 GPUs, here it is --gpus 2"):
        check_before_the_start(jobs, 2)
    (tmp_path / "runs" / "bf16" / "summary.json").unlink()  # a run that was stopped
    (tmp_path / "runs" / "bf16" / "env.json").write_text(json.dumps(H200 | {"world_size": 4}))
    with pytest.raises(ValueError, match=r"bf16: holds a run on 4 GPUs, here it is --gpus 1"):
        check_before_the_start(jobs, 1)


@pytest.mark.parametrize(("passes", "told"), [(0.9, False), (3.7, True)])
def test_text_that_came_back_is_told(tmp_path, passes, told):
    jobs = jobs_of(tmp_path, "bf16,delayed")
    for job in jobs:
        write_run(job, 2.0)
        with open(Path(job.cfg.checkpoint.output_dir) / "metrics.jsonl", "a") as file:
            file.write(f"\n{json.dumps({'step': 20, 'train/epoch': passes})}")
    notes = [note for note in judged(jobs)[0]["notes"] if "times over their data" in note]
    assert bool(notes) == told and all("went 3.7 times" in note for note in notes)


def test_the_noise_band_holds_the_reference(tmp_path):
    jobs = jobs_of(tmp_path, "bf16", seeds=1)
    for job, loss in zip(jobs, (2.0, 2.03), strict=True):
        write_run(job, loss)
    assert judged(jobs)[0]["noise_band_percent"] == pytest.approx((0.0, 1.5))


def test_speed_memory_and_cost_of_an_emulated_run_are_left_out(tmp_path):
    """On a GPU, where they were measured."""
    jobs = jobs_of(tmp_path, "bf16,mxfp8+te_backend=emulated")
    write_run(jobs[0], 2.0)
    write_run(jobs[1], 2.0, summary={"emulated": True, "peak_memory_gb": 9.0, "mfu_fp8": 0.1})
    result, (_, row) = judged(jobs, price=3.0)
    assert result["emulated"] and row.status == "PASS" and row.values["gap"] == pytest.approx(0)
    for name in ("tokens_per_second", "mfu_fp8", "peak_memory_gb", "gpu_hours", "cost"):
        assert row.values[name] is None
    assert "speedup" not in row.values


def test_speed_on_a_cpu_is_left_out(tmp_path):
    jobs = jobs_of(tmp_path, "bf16")
    write_run(jobs[0], 2.0, summary={"gpus": 0})
    assert judged(jobs)[1][0].values["tokens_per_second"] is None


def test_a_failed_noise_run_is_told(tmp_path):
    jobs = jobs_of(tmp_path, "bf16", seeds=1)
    write_run(jobs[0], 2.0)
    failed = {"bf16-seed43": Outcome(1, tmp_path / "x", "it broke", False)}
    result, rows = judged(jobs, failed)
    assert result["noise_band_percent"] is None and any("it broke" in note for note in result["notes"])
    assert exit_code(rows, failed, strict=False) == 1


def test_gaps_over_paired_seeds(tmp_path):
    """Of each seed the run against BF16 of that seed: +1.0 %, 0 and +0.2 %; BF16 itself moves by 5 %."""
    jobs = jobs_of(tmp_path, "bf16,delayed", seeds=1, paired=2)
    assert [(job.name, job.against, job.seed_of, job.cfg.optim.seed) for job in jobs] == [
        ("bf16", None, None, 42),
        ("delayed", "bf16", None, 42),
        ("bf16-seed43", None, "bf16", 43),
        ("delayed-seed43", "bf16-seed43", "delayed", 43),
        ("bf16-seed44", None, "bf16", 44),
        ("delayed-seed44", "bf16-seed44", "delayed", 44),
    ]
    # Another seed draws other weights and another order, with another number of label tokens.
    others = {42: {}, 43: {"label_tokens": 5003, "eval_loss": 2.6}, 44: {"label_tokens": 4998}}
    for job, loss in zip(jobs, (2.0, 2.02, 2.1, 2.1, 2.05, 2.0541), strict=True):
        seed = job.cfg.optim.seed
        write_run(job, loss, start=seed / 5, summary=others[seed])
    result, (reference, row) = judged(jobs)
    assert reference.status == "REFERENCE" and result["noise_band_percent"] == pytest.approx((0.0, 5.0))
    assert (row.variant, row.status) == ("delayed", "PASS"), "0.4 % on the mean"
    gaps = [row.values[name] for name in ("gap", "gap_low", "gap_high", "eval_gap")]
    assert gaps == pytest.approx([0.4, 0.0, 1.0, 0.0], abs=1e-6) and row.values["tail_loss"] == 2.02
    assert any("Gaps are means over the seeds 42, 43, 44" in note for note in result["notes"])
    write_verdict(result, [reference, row], tmp_path, "the command")
    assert "| gap | lowest gap | highest gap |" in (tmp_path / "verdict.md").read_text()

    _, (_, row) = conclude(jobs, read_runs(jobs, {}), {}, max_loss_gap=0.1, price=None)
    told = "its loss is, on the mean of 3 seeds, 0.40 % above bf16's, more than --max_loss_gap 0.1 %"
    assert (row.status, row.reason) == ("FAIL", told)

    failed = {"delayed-seed44": Outcome(1, tmp_path / "x", "it broke", False)}
    result, (_, row) = judged(jobs, failed)
    assert row.values["gap"] == pytest.approx(0.5)
    assert "delayed-seed44: not in the mean, it broke (exit code 1)" in result["notes"]
    assert exit_code([row], failed, strict=False) == 1


def test_the_note_on_paired_seeds_names_those_that_ran(tmp_path):
    jobs = jobs_of(tmp_path, "bf16,delayed", paired=2)
    for job in jobs:
        write_run(job, 2.0)
    result, _ = judged(jobs, {"bf16-seed43": Outcome(1, tmp_path / "x", "it broke", False)})
    assert any("Gaps are means over the seeds 42, 44" in note for note in result["notes"])


def test_a_reference_that_is_killed_ends_the_comparison_with_1(tmp_path, monkeypatch, capsys):
    killed = Outcome(-9, tmp_path / "bf16", "step 3/20", False, told=False)
    monkeypatch.setattr("benchmarks.compare.main.launch", lambda cfg, **_: killed)
    code, failed = run_jobs(jobs_of(tmp_path, "bf16,delayed"), gpus=1, folder=tmp_path)
    assert code == 1 and failed == {"bf16": killed}
    assert "the reference bf16 did not run: it was killed by SIGKILL" in capsys.readouterr().err


def test_a_run_older_than_a_setting_had_its_default(tmp_path):
    jobs = jobs_of(tmp_path, "bf16,delayed")
    for job in jobs:
        write_run(job, 2.0)
    config = Path(jobs[0].cfg.checkpoint.output_dir) / "config.json"
    settings = json.loads(config.read_text())
    del settings["overlong"]
    config.write_text(json.dumps(settings))
    assert [row.status for row in judged(jobs)[1]] == ["REFERENCE", "PASS"]


def test_a_pair_that_differs_in_more_than_precision_is_refused(tmp_path):
    jobs = jobs_of(tmp_path, "bf16,delayed", paired=1)
    for job in jobs:
        write_run(job, 2.0, summary={"label_tokens": 4000} if job.name == "delayed-seed43" else None)
    with pytest.raises(ValueError, match=r"delayed-seed43 and bf16-seed43 .*label_tokens 5000 there, 4000"):
        judged(jobs)


def test_each_pair_must_end_finite(tmp_path):
    jobs = jobs_of(tmp_path, "bf16,delayed", paired=1)
    for job in jobs:
        write_run(job, float("nan") if job.name == "delayed-seed43" else 2.0)
    _, (_, row) = judged(jobs)
    assert (row.status, row.reason) == ("FAIL", "its training loss does not end finite")


def test_a_variant_that_cannot_run_is_not_tried_with_other_seeds(tmp_path, monkeypatch):
    jobs, started = jobs_of(tmp_path, "bf16,nvfp4", paired=1), []

    def launch(cfg, *, gpus, log):
        started.append(Path(cfg.checkpoint.output_dir).name)
        code = 2 if "nvfp4" in started[-1] else 0
        return Outcome(code, Path(cfg.checkpoint.output_dir), "no such cores" if code else "", False)

    monkeypatch.setattr("benchmarks.compare.main.launch", launch)
    code, failed = run_jobs(jobs, gpus=1, folder=tmp_path)
    assert code == 0 and list(failed) == ["nvfp4"]
    assert started == ["bf16", "nvfp4", "bf16-seed43"]


def test_a_folder_whose_settings_are_broken_is_told(tmp_path):
    (job,) = jobs_of(tmp_path, "bf16")
    write_run(job, 2.0)
    saved = Path(job.cfg.checkpoint.output_dir) / "config.json"
    for broken in ("", "[]"):
        saved.write_text(broken)
        with pytest.raises(ValueError, match=r"config\.json: cannot be read .*; remove the folder to run it"):
            is_finished(job.cfg)


def test_a_finished_run_is_one_of_the_same_settings_and_length(tmp_path):
    job = jobs_of(tmp_path, "bf16")[0]
    assert not is_finished(job.cfg)
    write_run(job, 2.0)
    assert is_finished(job.cfg)
    for flags, told in {
        "--max_steps 30": "--max_steps 20 there, 30 here",
        "": "--max_steps 20 there, None here",
        "--max_steps 20 --batch_size 4": "--batch_size 8 there, 4 here",
        "--max_steps 20 --sharding_mode ddp": "--sharding_mode auto there, ddp here",
        "--max_steps 20 --log_interval 5": "--log_interval 1 there, 5 here",
        "--max_steps 20 --no_flash_attention": "--flash_attention True there, False here",
    }.items():
        with pytest.raises(ValueError, match=re.escape(f"holds a run of other settings ({told})")):
            is_finished(jobs_of(tmp_path, "bf16", flags=flags)[0].cfg)
    indifferent = "--max_steps 20 --save_interval 7 --num_workers 0 --use_wandb --wandb_project p"
    assert is_finished(jobs_of(tmp_path, "bf16", flags=indifferent)[0].cfg)
    (tmp_path / "runs" / "bf16" / "summary.json").unlink()
    assert not is_finished(job.cfg)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--variants bf16,curent", "--variants bf16,curent: unknown variant; did you mean 'current'?"),
        ("--variants delayed", "needs bf16 or bf16_hf"),
        ("--variants bf16,bf16", "is named twice"),
        ("--variants bf16,delayed+seed=3", "a variant may not change seed"),
        ("--variants bf16,delayed+nope=3", "unknown setting 'nope'"),
        ("--variants bf16,delayed+use_te=false", "a variant may not change use_te"),
        ("--variants bf16,delayed --use_te", "--use_te True: python -m benchmarks.compare decides it"),
        ("--variants bf16,delayed --lerning_rate 1", "unknown flag --lerning_rate; did you mean"),
        ("--variants bf16,block --fp8_attention", "variant block: --fp8_attention"),
        ("--variants bf16 --output_dir=", "--output_dir: '': no folder; name one"),
        ("--variants bf16 --noise_seeds -1", "--noise_seeds -1: must be at least 0"),
        ("--variants bf16 --paired_seeds -1", "--paired_seeds -1: must be at least 0"),
        ("--variants bf16 --gpus 0", "--gpus 0: must be at least 1"),
        ("--variants bf16 --gpus two", "--gpus two: must be a whole number"),
        ("--variants bf16 --max_loss_gap x", "--max_loss_gap x: must be a number"),
        ("--variants bf16 --config /nowhere.yaml", "--config /nowhere.yaml"),
        ("--variants bf16 --max_steps 0", "--max_steps 0: trains nothing"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, flags, message):
    assert main([*flags.split(), "--output_dir", str(tmp_path / "out")]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    assert message.removeprefix("--variants bf16,curent: ") in lines[0]
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_refused_before_anything_runs(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "out"
    assert main(["--variants", "bf16", "--output_dir", str(out), "--max_steps", "1"]) == 2
    assert f"error: --output_dir {out}: Not a directory; choose a folder" in capsys.readouterr().err


def test_no_variant_runs_in_another_recipe_than_its_own():
    settings = [variant.settings for variant in parse_variants([",".join(VARIANTS)])]
    assert len(settings) == len(VARIANTS) and {own["fp8_fallback"] for own in settings} == {"error"}


def test_a_value_may_hold_commas(tmp_path):
    names = [v.name for v in parse_variants(["bf16,delayed+precision_map=layers.0=bf16,layers.1=bf16,block"])]
    assert names == ["bf16", "delayed+precision_map=layers.0=bf16,layers.1=bf16", "block"]
    job = jobs_of(tmp_path, "bf16,delayed+precision_map=layers.0=bf16,layers.1=bf16+fp8_margin=1")[1]
    assert job.cfg.precision.precision_map == "layers.0=bf16,layers.1=bf16"
    assert (
        job.cfg.precision.fp8_margin == 1 and Path(job.cfg.checkpoint.output_dir).parent == tmp_path / "runs"
    )


def test_a_command_line_gives_the_settings_back():
    settings = {"model_name": "-x", "packing": False, "compile": False, "eval_at_start": True, "max_steps": 3}
    cfg = config_from_dict(settings | {"system_prompt": "two words\n'quoted'", "learning_rate": 3e-5})
    assert parse_config(to_flags(cfg), prog="p", description="d") == cfg


def test_flags_win_over_the_file_and_the_file_over_the_comparison_s_defaults(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("log_interval: 7\nbatch_size: 3\nmixed_precision: fp8\n")
    _, training = parse(f"--variants bf16 --output_dir x --config {file} --batch_size 5".split())
    cfg = build_jobs(parse_variants(["bf16"]), given_settings(training, "p"), tmp_path, 0)[0].cfg
    assert (cfg.log.log_interval, cfg.optim.batch_size, cfg.precision.mixed_precision) == (7, 5, "bf16")
    assert cfg.log.eval_at_start and not cfg.checkpoint.export


def test_a_run_outlives_a_comparison_that_is_killed(tmp_path):
    """It writes its own log, and saves; the folder is its own until it has ended."""
    flags = f"--variants bf16 --noise_seeds 0 --output_dir {tmp_path} {TINY} --max_steps 200"
    command = [sys.executable, "-m", "benchmarks.compare", *shlex.split(flags)]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    folder = tmp_path / "runs" / "bf16"
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not losses(folder) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.kill()
    process.communicate(timeout=60)
    given = os.fsencode(f"--output_dir={folder}")
    pids = [int(p.parent.name) for p in Path("/proc").glob("[0-9]*/cmdline") if given in p.read_bytes()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    again = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert again.returncode == 2 and not (tmp_path / "verdict.json").exists()
    assert "another run is writing to it; wait for it" in again.stderr.splitlines()[-1]
    while not (folder / "summary.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert max(losses(folder)) == 200
    assert f"run folder: {folder}" in (tmp_path / "logs" / "bf16.log").read_text()


def test_signals_go_to_torchrun_s_workers():
    """Stand-ins: a launcher with a worker (by its script's name) and another child; another's worker."""
    sleep = "import time; time.sleep(60)"
    worker = [sys.executable, "-c", sleep, str(ROOT / "train_multi_gpu.py")]
    program = f"import subprocess, time; print(subprocess.Popen({worker!r}).pid, flush=True); "
    program += f"subprocess.Popen([{sys.executable!r}, '-c', {sleep!r}]); time.sleep(60)"
    launcher = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    stranger = subprocess.Popen(worker)
    try:
        pid = int(launcher.stdout.readline())
        deadline = time.monotonic() + 10
        while not _workers(launcher.pid) and time.monotonic() < deadline:
            time.sleep(0.02)  # between fork and exec it has its parent's command line
        assert _workers(launcher.pid) == [pid]
    finally:
        stranger.kill()
        stranger.wait()
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.communicate()


def test_the_documented_command_is_one(tmp_path):
    page = (ROOT / "docs" / "compare.md").read_text()
    command = page.split("```")[1].replace("\\\n", " ")
    args, training = parse(shlex.split(command)[3:])
    jobs = build_jobs(
        parse_variants(args.variants), given_settings(training, "p"), tmp_path, args.noise_seeds
    )
    assert [job.name for job in jobs][:3] == ["bf16", "delayed", "current"] and len(jobs) == 6 + 2
    assert args.price_per_gpu_hour == 3 and jobs[0].cfg.data.eval_split == "test"
