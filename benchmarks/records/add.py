"""Add runs to the table of recorded runs, benchmarks/results/records.jsonl.gz.

python -m benchmarks.records.add RUN [RUN ...] --study NAME
"""

from __future__ import annotations

import sys
from pathlib import Path

from fp8_suite.benchmarks.records.runs import find_runs
from fp8_suite.benchmarks.records.table import TABLE, add_runs
from fp8_suite.core.cli import as_command, command_parser
from fp8_suite.core.errors import counted


@as_command
def main(argv: list[str]) -> int:
    """Add runs. Exit codes: 0 done, 2 a folder is not a run folder."""
    parser = command_parser("python -m benchmarks.records.add", __doc__)
    runs = "run folder, or a folder that contains runs"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=runs)
    parser.add_argument("--study", required=True, metavar="NAME", help="study to add the runs to")
    table = "table to write (default: benchmarks/results/records.jsonl.gz)"
    parser.add_argument("--table", type=Path, default=TABLE, metavar="FILE", help=table)
    named = "name of a model that was trained from a folder"
    parser.add_argument("--model_name", metavar="NAME", help=named)
    args = parser.parse_args(argv)
    folders = [path for folder in args.runs for path in find_runs(folder)]
    add_runs(folders, args.study, args.table, model_name=args.model_name)
    print(f"added {counted(len(folders), 'run')} to study {args.study} in {args.table}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
