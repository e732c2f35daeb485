"""Add finished or stopped runs to the table of recorded runs.

python -m benchmarks.records.add RUN [RUN ...] --study NAME
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.records.launch import command_parser, run_command
from benchmarks.records.runs import find_runs, read_run
from benchmarks.records.table import TABLE, add_runs


def add(argv: list[str]) -> int:
    parser = command_parser("python -m benchmarks.records.add", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder, or a folder of runs")
    parser.add_argument("--study", required=True, metavar="NAME", help="name of the rows' study")
    parser.add_argument("--table", type=Path, default=TABLE, metavar="FILE", help="default: %(default)s")
    args = parser.parse_args(argv)
    runs = [read_run(path) for folder in args.runs for path in find_runs(folder) or [folder]]
    add_runs(runs, args.study, args.table)
    print(f"{args.study}: {len(runs)} runs recorded in {args.table}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Add the runs. Exit code 2 if a folder is not a run folder."""
    return run_command(add, argv)


if __name__ == "__main__":
    sys.exit(main())
