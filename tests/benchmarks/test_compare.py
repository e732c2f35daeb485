"""benchmarks.compare: a comparison that is killed, stopped and resumed; its verdict; its errors."""

import json
import os
import re
import shlex
import signal
from pathlib import Path

import pytest
from fp8_suite.benchmarks.compare.main import main, parse
from fp8_suite.benchmarks.compare.variant_runs import build_runs, check_before_start
from fp8_suite.benchmarks.compare.verdict import conclude, exit_code
from fp8_suite.benchmarks.launch import grid
from fp8_suite.benchmarks.launch.process import Outcome
from fp8_suite.benchmarks.launch.variants import parse_variants
from fp8_suite.benchmarks.records.runs import read_run
from fp8_suite.benchmarks.report.judge import lines_of
from fp8_suite.core.errors import EXIT_INTERRUPTED, UserError
from fp8_suite.core.packages import ROOT
from fp8_suite.training.trainer import Trainer

from tests.benchmarks.folders import append, launch_here, write_run
from tests.training.parallel.jobs import curve, last_logged

H200 = {"gpu_name": "NVIDIA H200", "versions": {"torch": "2.11.0"}, "git": None}


def test_a_stopped_comparison_is_resumed_by_the_same_command(tmp_path, monkeypatch, capsys):
    """All in this process; tests/benchmarks/test_launch.py forwards signals to processes."""
    folder = tmp_path / "compared"
    command = (
        f"--variants bf16,delayed --paired_seeds 0 --output_dir {folder} "
        "--num_of_samples 60 --max_seq_length 128 --batch_size 2 --eval_samples 4 --num_workers 0 "
        "--num_proc 1 --max_steps 20 --learning_rate 1e-3 --save_interval 0"
    ).split()
    step, stops = Trainer._before_step, iter([signal.SIGTERM])

    def stop_or_step(trainer, *arguments):
        if trainer.progress.step and (number := next(stops, None)):
            os.kill(os.getpid(), number)
        return step(trainer, *arguments)

    monkeypatch.setattr(Trainer, "_before_step", stop_or_step)
    monkeypatch.setattr(grid, "launch", launch_here)
    assert main(command) == EXIT_INTERRUPTED
    printed = capsys.readouterr()
    assert "interrupted in bf16; run the same command to resume" in printed.out + printed.err
    assert "[2/2]" not in printed.out and 1 <= last_logged(folder / "runs/bf16") < 20
    code, output = main(command), capsys.readouterr().out
    assert code == 0, output
    assert f"{folder}/runs/bf16/checkpoints/step_" in output, "resumed from its checkpoint"
    verdict = json.loads((folder / "verdict.json").read_text())
    training = verdict["variants"]["delayed"]["training"]
    tail = {}
    for name in ("bf16", "delayed"):
        logged = curve(folder / "runs" / name)
        assert sorted(logged) == list(range(1, 21))
        tail[name] = (logged[19] + logged[20]) / 2  # 10 % of 20
    assert training["gaps_percent"] == [pytest.approx(100 * (tail["delayed"] / tail["bf16"] - 1))]
    assert training["verdict"] == "INCONCLUSIVE" and (folder / "loss.png").exists()


def planned_runs(folder, variants="bf16,delayed,current", flags="--max_steps 20", **seeds):
    _, common = parse(["--variants", variants, "--output_dir", str(folder), *flags.split()])
    return build_runs(parse_variants([variants]), common, folder, **seeds)


def write(run, loss, *, start=8.0, summary=None, environment=None, change=None, **config):
    """A finished run of 20 steps on a GPU, with the tail loss `loss`; `change` edits the lines of its log."""
    settings = run.cfg.to_dict()
    lines = [{"step": 0, "eval/loss": start}]
    values = [9.0] * 18 + [loss - 0.1, loss + 0.1]
    lines += [{"step": step, "train/loss": value} for step, value in enumerate(values, 1)]
    known = {name: settings[name] for name in ("use_te", "mixed_precision")}
    recipe = settings["fp8_scenario"] if settings["mixed_precision"] == "fp8" else settings["mixed_precision"]
    known |= {"recipe": recipe}
    known |= {"steps": 20, "label_tokens": 5000, "eval_label_tokens": 300, "eval_loss": 2.5, "world_size": 1}
    known |= {"tokens_per_second": 1000.0, "gpu_hours": 0.5, "gpus": 1, "emulated": False}
    environment = H200 | (environment or {})
    write_run(run.folder, summary=known | (summary or {}), environment=environment, **settings | config)
    for line in change(lines) if change else lines:
        append(run.folder, **line)


def write_all(planned, *values):
    """Write all runs, with the given losses or 2.0."""
    for run, loss in zip(planned, values or [2.0] * len(planned), strict=True):
        write(run, loss)
    return planned


def judged(planned, failures=None, max_loss_gap=0.5):
    failures = failures or {}
    records = {run.name: read_run(run.folder) for run in planned if run.name not in failures}
    return conclude(planned, records, failures, max_loss_gap)


def verdicts(verdict):
    return {(r.name, loss): judged.verdict for r in verdict.results for loss, judged in r.judgements.items()}


def diverging(lines):
    return [*lines[:-1], lines[-1] | {"train/loss": float("nan")}]


def finished(folder, variants, *flags):
    """Run the command on written runs, which are finished."""
    words = f"--variants {variants} --max_steps 20 --price_per_gpu_hour 3 --output_dir {folder}".split()
    return main([*words, *flags])


SEEDS = [
    ("bf16", None, 42),
    ("delayed", "bf16", 42),
    ("bf16-seed43", None, 43),
    ("delayed-seed43", "bf16-seed43", 43),
    ("bf16-seed44", None, 44),
    ("delayed-seed44", "bf16-seed44", 44),
]


def test_every_variant_is_compared_with_a_baseline_of_its_seed(tmp_path):
    planned = planned_runs(tmp_path, "bf16,delayed", paired_seeds=2)
    assert [(run.name, run.baseline, run.cfg.optim.seed) for run in planned] == SEEDS
    noise = planned_runs(tmp_path, "bf16,delayed", paired_seeds=1, noise_seeds=2)
    assert [run.name for run in noise] == [name for name, *_ in SEEDS if name != "delayed-seed44"]
    assert parse(["--variants", "bf16", "--output_dir", str(tmp_path)])[0].paired_seeds == 2, "the default"


@pytest.mark.parametrize(
    ("losses", "training", "code"),
    [
        ((2.002, 2.103, 2.053), "PASS", 0),  # +0.10, +0.14, +0.15 %
        ((2.02, 2.124, 2.072), "FAIL", 1),  # +1.00, +1.14, +1.07 %
        ((2.02, 2.1, 2.0541), "INCONCLUSIVE", 0),  # +1.0, 0, +0.2 %
    ],
)
def test_the_verdict_is_a_test_over_pairs_of_one_seed(tmp_path, capsys, losses, training, code):
    """BF16 itself moves by 5 % between the seeds; the evaluation losses of both are equal, so they pass."""
    planned = planned_runs(tmp_path, "bf16,delayed", paired_seeds=2)
    values = [loss for pair in zip((2.0, 2.1, 2.05), losses, strict=True) for loss in pair]
    for run, loss in zip(planned, values, strict=True):
        tokens = {"label_tokens": 5000 + run.cfg.optim.seed}
        write(run, loss, start=run.cfg.optim.seed / 5, summary=tokens | {"tokens_per_second": 1250.0})
    assert finished(tmp_path, "bf16,delayed", "--strict") == int(training != "PASS")
    assert exit_code(judged(planned), {}, strict=False) == code
    page = (tmp_path / "verdict.md").read_text()
    assert page.startswith(f"{training} for delayed: ") and "1.50" in page  # 0.5 hours at a price of 3
    (record,) = json.loads((tmp_path / "verdict.json").read_text())["variants"].values()
    assert (record["training"]["verdict"], record["evaluation"]["verdict"]) == (training, "PASS")
    assert record["training"]["gaps_percent"] == pytest.approx(
        [100 * (loss / reference - 1) for reference, loss in zip(values[::2], values[1::2], strict=True)]
    )
    html = (tmp_path / "report.html").read_text()
    assert html.index(f"{training} for delayed") < html.index("<h1>"), "the report opens with the answer"


def test_seeds_can_be_added_to_a_finished_comparison(tmp_path, capsys, monkeypatch):
    """Two pairs do not decide; the same command with another seed trains only the new pair."""
    values = (2.0, 2.004, 2.0, 2.001, 2.0, 2.002)
    write_all(planned_runs(tmp_path, "bf16,delayed", paired_seeds=1), *values[:4])
    assert finished(tmp_path, "bf16,delayed", "--paired_seeds", "1") == 0
    verdict = json.loads((tmp_path / "verdict.json").read_text())["variants"]["delayed"]["training"]
    assert (verdict["verdict"], verdict["further_seeds"]) == ("INCONCLUSIVE", 1)
    started = []

    def launch(cfg, *, gpus, log):
        name = Path(cfg.checkpoint.output_dir).name
        started.append(name)
        run = next(r for r in planned_runs(tmp_path, "bf16,delayed", paired_seeds=2) if r.name == name)
        write(run, values[[name for name, *_ in SEEDS].index(name)])
        return Outcome(0, run.folder)

    monkeypatch.setattr(grid, "launch", launch)
    assert finished(tmp_path, "bf16,delayed", "--paired_seeds", "2") == 0
    assert started == ["bf16-seed44", "delayed-seed44"]
    assert "training loss by +0.00 %." in (tmp_path / "verdict.md").read_text(), "one number, no span"
    assert (tmp_path / "verdict.md").read_text().startswith("PASS for delayed")


def test_a_seed_that_failed_is_left_out(tmp_path):
    planned = write_all(planned_runs(tmp_path, "bf16,delayed", paired_seeds=2))
    failures = {"delayed-seed44": Outcome(1, tmp_path, "it broke")}
    (tmp_path / "settings.json").touch()  # it had started
    verdict = judged(planned, failures)
    assert len(verdict.results[0].pairs) == 2 and exit_code(verdict, failures, strict=False) == 1
    assert "delayed-seed44 did not finish: it broke (exit code 1)." in verdict.notes


def test_losses_that_are_not_finite_fail(tmp_path):
    planned = write_all(planned_runs(tmp_path, "bf16,delayed,current", paired_seeds=2))
    for number in (1, 6):  # delayed, and BF16 with the third seed
        write(planned[number], 2.0, change=diverging)
    write(planned[2], 2.0, summary={"eval_loss": "NaN"})
    verdict = judged(planned)
    answers = verdicts(verdict)
    assert answers["delayed", "training"] == answers["current", "evaluation"] == "FAIL"
    assert answers["current", "training"] == "PASS" and len(verdict.results[1].training.gaps) == 2
    assert exit_code(verdict, {}, strict=False) == 1


def test_a_reference_that_diverges_leaves_no_verdict(tmp_path, capsys):
    planned = write_all(planned_runs(tmp_path, "bf16,delayed"))
    (tmp_path / "verdict.json").touch()
    write(planned[0], 2.0, change=diverging)
    assert finished(tmp_path, "bf16,delayed", "--paired_seeds", "0") == 2
    assert "the reference's last training loss is not finite" in capsys.readouterr().err
    assert not (tmp_path / "verdict.json").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 4}, "sequences per step 4 instead of 8"),
        ({"summary": {"label_tokens": 4999}}, "label_tokens 4999 instead of 5000"),
        ({"start": 8.1}, "evaluation loss before the first step 8.1 instead of 8.0"),
        ({"environment": {"data": {"train": {"fingerprint": "2e"}}}}, "train samples 2e instead of 1f"),
    ],
)
def test_runs_of_different_experiments_are_not_compared(tmp_path, changes, message):
    bf16, delayed = planned_runs(tmp_path, "bf16,delayed")
    write(bf16, 2.0, environment={"data": {"train": {"fingerprint": "1f"}}})
    write(delayed, 2.0, **changes)
    with pytest.raises(UserError, match=re.escape(message)):
        judged([bf16, delayed])


def test_equal_weights_of_the_same_precision_must_score_the_same(tmp_path):
    """0.5 % is within what FP8 changes of an untrained model's loss, and not within BF16's own difference."""
    planned = write_all(planned_runs(tmp_path, "bf16,delayed,bf16+moment_dtype=bf16"))
    write(planned[1], 2.0, start=8.04)
    judged(planned)
    write(planned[2], 2.0, start=8.04)
    with pytest.raises(UserError, match="evaluation loss before the first step"):
        judged(planned)


def test_what_follows_from_a_seed_or_the_split_of_a_batch_may_differ(tmp_path):
    split = "bf16,delayed+batch_size=2+gradient_accumulation_steps=4"
    planned = write_all(planned_runs(tmp_path, split, noise_seeds=1))
    write(planned[2], 2.0, start=8.5, summary={"label_tokens": 4000, "eval_label_tokens": 200})
    judged(planned)
    pair = write_all(planned_runs(tmp_path / "b", "bf16,delayed", paired_seeds=1))
    write(pair[-1], 2.0, summary={"label_tokens": 4000})
    with pytest.raises(UserError, match=r"delayed-seed43 cannot be compared with bf16-seed43: .* 4000 inst"):
        judged(pair)


@pytest.mark.parametrize(
    ("variants", "baselines", "other_layers"),
    [
        ("tensorwise,delayed,bf16_hf,bf16", ["bf16_hf", "bf16", "bf16", None], {"bf16_hf"}),
        ("bf16,tensorwise,delayed", [None, "bf16", "bf16"], {"tensorwise"}),
        ("bf16_hf,tensorwise", [None, "bf16_hf"], set()),
        ("bf16,fp16,bf16_hf,fp16_hf", [None, "bf16", "bf16", "bf16_hf"], {"bf16_hf"}),
    ],
)
def test_each_variant_s_baseline_has_its_layers_if_possible(tmp_path, variants, baselines, other_layers):
    planned = write_all(planned_runs(tmp_path, variants))
    by_name = {run.name: run.baseline for run in planned}
    assert [by_name[name] for name in variants.split(",")] == baselines and planned[0].baseline is None
    lines = lines_of(judged(planned).results)
    assert {line.result.name for line in lines if line.settings == "use_te"} == other_layers


@pytest.mark.parametrize(
    ("outcome", "status"),
    [(Outcome(1, Path("/nowhere"), "no such cores"), "SKIPPED"), (Outcome(-9, Path("/nowhere")), "FAIL")],
)
def test_a_variant_that_does_not_run_is_skipped_or_fails(tmp_path, outcome, status):
    planned = planned_runs(tmp_path, "bf16,nvfp4")
    write(planned[0], 2.0)
    failures = {"nvfp4": outcome}
    verdict = judged(planned, failures)
    assert verdict.left_out["nvfp4"].startswith(status) and f"nvfp4: {status}" in verdict.answer
    assert exit_code(verdict, failures, strict=False) == int(status == "FAIL")
    assert exit_code(verdict, failures, strict=True) == 1


def test_incomparable_runs_are_refused_before_anything_runs(tmp_path):
    with pytest.raises(UserError, match=r"delayed.* and bf16 cannot be compared: --batch_size x .* 4 and 8"):
        check_before_start(planned_runs(tmp_path, "bf16,delayed+batch_size=4"))
    with pytest.raises(UserError) as refused:
        check_before_start(planned_runs(tmp_path, flags="--global_batch_size 16", gpus=3))
    assert "global_batch_size" in refused.value.flags
    split = "bf16,delayed+batch_size=auto,current+batch_size=2"
    check_before_start(planned_runs(tmp_path, split, flags="--global_batch_size 16", gpus=2))
    write(planned_runs(tmp_path, "bf16,delayed")[0], 2.0)
    check_before_start(planned_runs(tmp_path, "bf16,delayed"))
    with pytest.raises(UserError, match=r"--gpus 2: .*bf16 holds a run on 1 GPU;"):
        check_before_start(planned_runs(tmp_path, "bf16,delayed", gpus=2))


@pytest.mark.parametrize(("broken", "started"), [("nvfp4", 3), ("bf16", 1)])
def test_what_failed_is_not_repeated_with_other_seeds(tmp_path, monkeypatch, capsys, broken, started):
    launched = []

    def launch(cfg, *, gpus, log):
        launched.append(Path(cfg.checkpoint.output_dir).name)
        run = next(r for r in planned_runs(tmp_path, "bf16,nvfp4", paired_seeds=1) if r.name == launched[-1])
        if run.variant != broken:
            write(run, 2.0)
        return Outcome(2 if run.variant == broken else 0, run.folder, "no such cores")

    monkeypatch.setattr(grid, "launch", launch)
    assert finished(tmp_path, "bf16,nvfp4", "--paired_seeds", "1") == (2 if broken == "bf16" else 1)
    assert launched == ["bf16", "nvfp4", "bf16-seed43"][:started]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--variants bf16,curent", "unknown variant; did you mean 'current'?"),
        ("--variants delayed", "--variants delayed: needs bf16 or bf16_hf"),
        ("--variants bf16,bf16", "two variants have the same name or run folder"),
        ("--variants bf16,delayed+seed=3", "a variant must not change seed"),
        ("--variants bf16,delayed --use_te", "--use_te: python -m benchmarks.compare sets this"),
        ("--variants bf16 --max_loss_gap nan", "--max_loss_gap nan: must be a finite number"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, flags, message):
    assert main([*f"--output_dir {tmp_path / 'out'}".split(), *flags.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_documented_command_works(tmp_path):
    page = (ROOT / "docs" / "compare.md").read_text()
    args, common = parse(shlex.split(page.split("```")[1].replace("\\\n", " "))[3:])
    planned = build_runs(parse_variants(args.variants), common, tmp_path, paired_seeds=args.paired_seeds)
    assert [run.name for run in planned][:3] == ["bf16", "delayed", "current"] and len(planned) == 6 * 3
    assert planned[0].cfg.log.eval_at_start and not planned[0].cfg.checkpoint.export, "defaults"


def test_samples_and_export_dtype_need_the_export_that_a_comparison_leaves_out(tmp_path):
    demo = f"--config {ROOT / 'configs' / 'demo.yaml'} --eval_samples 200"
    for flags, samples, dtype in ((demo, 2, "bf16"), ("--export_dtype both", 0, "both")):
        saved = planned_runs(tmp_path, "bf16,delayed", flags=flags)[1].cfg.checkpoint
        assert (saved.export, saved.generate_samples, saved.export_dtype) == (True, samples, dtype)
    without = planned_runs(tmp_path, "bf16,delayed", flags=f"{demo} --generate_samples 0")
    assert not any(run.cfg.checkpoint.export for run in without)
