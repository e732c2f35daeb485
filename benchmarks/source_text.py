"""Collect text that does not repeat from the sources and documents of this machine.

    python -m benchmarks.source_text OUT --megabytes 250 [--folders /usr/lib/python3 ...]

OUT becomes a data set of whole files in random order, for --dataset_name: its split `train` is that large,
and one file in a hundred is in `test`. Files with equal content appear once. The text has many licences, so
it is for this machine only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import site
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from fp8_suite.benchmarks.records.launch import command_parser, run_command
from fp8_suite.core.errors import bad_setting

PROG = "python -m benchmarks.source_text"
SUFFIXES = {".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".cuh", ".cu", ".cpp", ".c"}
SMALLEST, LARGEST = 2**10, 2**18  # bytes; larger files are mostly tables
EVERY = 100  # one file in so many is for the test split


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command_parser(PROG, __doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="new folder")
    parser.add_argument("--megabytes", type=float, required=True, metavar="X", help="text of the split train")
    here = sorted({*site.getsitepackages(), sysconfig.get_path("stdlib"), "/usr/include", "/usr/share/doc"})
    parser.add_argument(
        "--folders", nargs="+", default=here, metavar="DIR", help=f"folders (default: {' '.join(here)})"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the order (default: 0)")
    return parser.parse_args(argv)


def texts(folders: list[str], seed: int) -> Iterator[str]:
    """Yield the texts of the folders' files in random order, each once."""
    paths = {
        path.resolve() for folder in folders for path in Path(folder).rglob("*") if path.suffix in SUFFIXES
    }
    order, seen = sorted(paths), set()
    random.Random(seed).shuffle(order)
    for path in order:
        try:
            if not (path.is_file() and SMALLEST <= path.stat().st_size <= LARGEST):
                continue
            content = path.read_bytes()
            text = content.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.sha1(content).digest()
        if digest not in seen:
            seen.add(digest)
            yield text


def collect(argv: list[str]) -> int:
    arguments = parse(argv)
    if arguments.out.exists():
        raise bad_setting("exists; give a new folder", out=arguments.out)
    arguments.out.mkdir(parents=True)
    written, wanted = {"train": 0, "test": 0}, arguments.megabytes * 1e6
    with ExitStack() as stack:
        paths = {split: arguments.out / f"{split}.jsonl" for split in written}
        files = {
            split: stack.enter_context(path.open("w", encoding="utf-8")) for split, path in paths.items()
        }
        for number, text in enumerate(texts(arguments.folders, arguments.seed)):
            split = "test" if number % EVERY == 0 else "train"
            files[split].write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            written[split] += len(text.encode("utf-8"))
            if written["train"] >= wanted:
                break
    print(", ".join(f"{split}: {size / 1e6:.1f} MB" for split, size in written.items()))
    if written["train"] < wanted:
        print(f"the folders have no more than that; {wanted / 1e6:.1f} MB were asked for", file=sys.stderr)
        return 1
    return 0


def main(argv: list[str] | None = None) -> int:
    """Collect the text. Exit codes: 0 done, 1 too little text, 2 bad setting."""
    return run_command(collect, argv)


if __name__ == "__main__":
    sys.exit(main())
