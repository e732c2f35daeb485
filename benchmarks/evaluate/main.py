"""Evaluate trained models: loss and answers on their data set, and tasks of lm-eval, in one table.

python -m benchmarks.evaluate RUN|EXPORT|MODEL ... [--tasks loss,exact_match,gsm8k] [--output_dir DIR]
"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from fp8_suite.benchmarks.evaluate.harness import find_tasks
from fp8_suite.benchmarks.evaluate.targets import DATA, find_targets
from fp8_suite.benchmarks.records.evaluation import Result, write_results
from fp8_suite.benchmarks.records.runs import read_run
from fp8_suite.benchmarks.report.tables import Columns, Table, make_table, markdown
from fp8_suite.core.cli import add_number, add_setting, as_command, command_parser
from fp8_suite.core.errors import bad_setting, without_flag
from fp8_suite.core.files import replace_file
from fp8_suite.core.redact import redact
from fp8_suite.training.config import all_settings

PROG = "python -m benchmarks.evaluate"
MEASURES = ("loss", "exact_match")  # all other tasks are lm-eval's


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Return the parsed flags, and the given settings of the data."""
    parser = command_parser(PROG, __doc__)
    text = "run folder (its exports), folder with runs, exported model, or model of the hub"
    parser.add_argument("models", nargs="+", metavar="RUN|EXPORT|MODEL", help=text)
    text = "loss and exact_match on the data set, or tasks of lm-eval (default: loss,exact_match)"
    parser.add_argument("--tasks", type=lambda text: text.split(","), metavar="NAME,...", help=text)
    output = "folder for table, JSON and answers"
    parser.add_argument("--output_dir", type=Path, metavar="DIR", help=output)
    parser.add_argument("--include_path", type=Path, metavar="DIR", help="lm-eval: folder of tasks")
    batch = "samples per batch; halved if GPU memory is full (default: by device)"
    add_number(parser, "batch_size", None, batch)
    add_number(parser, "max_new_tokens", 512, "longest answer")
    examples = "lm-eval: examples in the prompt (default: the task's)"
    add_number(parser, "num_fewshot", None, examples, minimum=0)
    add_number(parser, "limit", None, "lm-eval: samples per task (default: all)")
    text = "lm-eval: prompt with the chat template"
    parser.add_argument("--apply_chat_template", action="store_true", help=text)
    data = parser.add_argument_group("data (default: the run's)")
    for name in DATA:
        add_setting(data, name, all_settings()[name])
    args = parser.parse_args(argv)
    return args, {name: getattr(args, name) for name in DATA if hasattr(args, name)}


@as_command
@without_flag("model_name")
def main(argv: list[str]) -> int:
    """Evaluate and print the table. Exit codes: 0 done, 2 bad setting, 75 interrupted."""
    args, given = parse(argv)
    targets = find_targets(args.models, given)
    tasks = [task for task in args.tasks or () if task not in MEASURES]
    measures = [name for name in MEASURES if name in (args.tasks or MEASURES)]
    if measures and "dataset_name" not in given and not any(target.run for target in targets):
        raise bad_setting("no run is given; add --dataset_name, or other --tasks", tasks=",".join(measures))
    manager = find_tasks(tasks, args.include_path) if tasks else None
    if args.output_dir:
        args.output_dir.mkdir(parents=True, exist_ok=True)
    from fp8_suite.benchmarks.evaluate.measure import measure  # imports torch

    results: list[Result] = []
    answers: list[dict[str, Any]] = []
    by_run: dict[Path, list[Result]] = {}
    for number, target in enumerate(targets, 1):
        print(f"[{number}/{len(targets)}] {target.path}", flush=True)
        measured, cases = measure(target, measures, tasks, manager, args)
        results, answers = results + measured, answers + cases
        if target.run:
            of_run = by_run[target.run] = by_run.get(target.run, []) + measured
            write_results(target.run, of_run, steps=read_run(target.run).value("steps"))
    table = results_table(results)
    text = markdown(*table)
    print(f"\n{text}\n")
    if args.output_dir:
        command = redact(shlex.join([*PROG.split(), *argv]))
        write_results(args.output_dir, results, command=command)
        replace_file(args.output_dir / "evaluation.md", f"{text}\n\n```\n{command}\n```\n".encode())
        lines = "".join(json.dumps(case) + "\n" for case in answers)
        replace_file(args.output_dir / "answers.jsonl", lines.encode())
        print(f"evaluation: {args.output_dir / 'evaluation.md'}")
    return 0


def results_table(results: list[Result]) -> Table:
    """Return a table of all results, sorted by measure."""
    first = {result.measure: result for result in reversed(results)}
    order = {measure: position for position, measure in enumerate(reversed(first))}
    columns: Columns = {
        "measure": (lambda result: result.measure, "{}"),
        "model": (lambda result: result.model, "{}"),
        "weights": (lambda result: result.weights, "{}"),
        "value": (lambda result: result.value, "{:.4f}"),
        "standard error": (lambda result: result.stderr, "{:.4f}"),
        "samples": (lambda result: result.samples, "{:,}"),
        "to the first": (
            lambda result: result.difference(first[result.measure]),
            "{0[0]:+.4f} +- {0[1]:.4f}",
        ),
        "note": (lambda result: result.note, "{}"),
    }
    return make_table(columns, sorted(results, key=lambda result: order[result.measure]))
