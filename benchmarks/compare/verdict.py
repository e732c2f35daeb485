"""Verdict of a comparison: the answer in words, a line per variant and loss, and notes."""

from __future__ import annotations

from pathlib import Path

from fp8_suite.benchmarks.compare.variant_runs import VariantRun
from fp8_suite.benchmarks.launch.grid import Failures
from fp8_suite.benchmarks.records.runs import RunRecord, bad_input
from fp8_suite.benchmarks.report import gaps
from fp8_suite.benchmarks.report.judge import Verdict, answer, judge_pairs, lines_of, verdict_table
from fp8_suite.benchmarks.report.tables import markdown, provenance, report_tables
from fp8_suite.core.files import replace_file, to_json

Records = dict[str, RunRecord]  # by name of the run


def conclude(planned: list[VariantRun], records: Records, failures: Failures, max_loss_gap: float) -> Verdict:
    """Judge every variant over the seeds that finished. UserError if runs are not comparable."""
    check_records(planned, records)
    pairs: dict[str, list[tuple[RunRecord, RunRecord]]] = {}
    for run in planned:
        if run.baseline and {run.variant, run.name, run.baseline} <= records.keys():
            pairs.setdefault(run.variant, []).append((records[run.name], records[run.baseline]))
    first = [run for run in planned if run.first and run.baseline and run.variant not in pairs]
    stopped = {run.variant: _why_stopped(run, failures) for run in first}
    results = [judge_pairs(pairs[name], max_loss_gap, name, pairs[name][0][1].name) for name in pairs]
    answers = [answer(results) or "Nothing was compared.", *(f"{n}: {text}." for n, text in stopped.items())]
    notes = _notes_on_losses(records) + _notes_on_runs(records, failures)
    return Verdict(records[planned[0].name], results, " ".join(answers), notes, stopped)


def exit_code(verdict: Verdict, failures: Failures, *, strict: bool) -> int:
    """Return 1 if a run or a loss failed, or with `strict` if one was skipped or not decided; else 0."""
    verdicts = {line.judgement.verdict for line in lines_of(verdict.results)}
    failed = "FAIL" in verdicts or not all(outcome.refused for outcome in failures.values())
    return int(failed or (strict and bool(failures or "INCONCLUSIVE" in verdicts)))


def check_records(planned: list[VariantRun], records: Records) -> None:
    """Raise UserError unless all runs are of one experiment, and the reference did not diverge."""
    reference = planned[0]
    for run in planned[1:]:
        compared = reference.name if run.first or run.baseline is None else run.baseline
        if {run.name, compared} <= records.keys():
            record, baseline = records[run.name], records[compared]
            if different := gaps.differences(record, baseline, experiment=True):
                raise bad_input(
                    f"{record.name} cannot be compared with {baseline.name}: it has {'; '.join(different)}; "
                    f"delete the wrong run folder ({record.folder} or {baseline.folder}) to run it again"
                )
    if not gaps.ends_finite(records[reference.name]):
        reason = "the reference's last training loss is not finite; try a lower --learning_rate"
        raise bad_input(f"{records[reference.name].folder}: {reason}")


def _why_stopped(run: VariantRun, failures: Failures) -> str:
    if run.name not in failures:
        return f"FAIL, its baseline {run.baseline} failed"
    outcome = failures[run.name]
    return f"{'SKIPPED' if outcome.refused else 'FAIL'}, {outcome.reason}"


def _notes_on_losses(records: Records) -> list[str]:
    """Return what the losses show beside the answer. The first record is the reference's."""
    reference, notes = next(iter(records.values())), []
    repeated = [run for run in records.values() if gaps.repeats(run, reference)]
    if moved := [100 * gap for run in repeated if (gap := gaps.final_gap(run, reference)) is not None]:
        span = " to ".join(dict.fromkeys(f"{gap:+.2f}" for gap in (min(moved), max(moved))))
        notes.append(f"Another seed moves the reference's own training loss by {span} %.")
    epochs = [epoch for _, epoch in reference.series("train/epoch")]
    if epochs and epochs[-1] > 1:
        notes.append(
            f"The runs trained for {epochs[-1]:.1f} epochs. After the first, the training loss also measures "
            "memorisation, in which precisions differ more: compare the evaluation losses."
        )
    return notes


def _notes_on_runs(records: Records, failures: Failures) -> list[str]:
    """Return notes on emulation, machines, skipped steps and failures."""
    notes = []
    if emulated := [name for name, record in records.items() if record.emulated]:
        notes.append(
            f"EMULATED: {', '.join(emulated)}. TE layers or FP8 GEMMs were computed in plain PyTorch. "
            "Losses are meaningful; speed, memory and hours are not, and are left out."
        )
    machines = sorted({provenance(record, date=False) for record in records.values()})
    warning = "MACHINES OR VERSIONS DIFFER, so speeds may not be comparable: "
    notes.append(f"{warning if len(machines) > 1 else 'All runs: '}{'; '.join(machines)}.")
    for name, record in records.items():
        skipped, overflows = ((record.value(f"{kind}_steps") or 0) for kind in ("skipped", "overflow"))
        if failed := skipped - overflows:
            notes.append(f"{name} skipped {failed} steps: non-finite loss or gradient.")
        if overflows:
            notes.append(f"{name} skipped {overflows} steps to lower its FP16 loss scale.")
    notes += [f"{name} did not finish: {outcome.reason}." for name, outcome in failures.items()]
    return notes


def write_verdict(
    verdict: Verdict,
    records: Records,
    folder: Path,
    *,
    command: str,
    max_loss_gap: float,
    price: float | None = None,
) -> None:
    """Print the verdict; write verdict.json and verdict.md. Their first line is the answer."""
    record = {
        "answer": verdict.answer,
        "reference": verdict.reference.name,
        "max_loss_gap_percent": max_loss_gap,
        "seeds": sorted({run.config["seed"] for run in records.values()}),
        "emulated": any(run.emulated for run in records.values()),
        "variants": {
            result.name: {loss: judgement.to_dict() for loss, judgement in result.judgements.items()}
            | {"speedup": result.speedup}
            for result in verdict.results
        },
        "stopped": verdict.left_out,
        "notes": verdict.notes,
        "command": command,
    }
    replace_file(folder / "verdict.json", to_json(record, indent=1))
    table = [markdown(*verdict_table(verdict.results))] if verdict.results else []
    body = "\n\n".join([verdict.answer, *table, "\n".join(f"- {note}" for note in verdict.notes)])
    runs = markdown(*report_tables([*records.values()], price)["runs"])
    replace_file(folder / "verdict.md", f"{body}\n\n{runs}\n\n```\n{command}\n```\n".encode())
    print(f"\n{body}\n\nverdict: {folder / 'verdict.md'}\n", flush=True)
