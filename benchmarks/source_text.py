"""Collect text that does not repeat from the sources and documents of this machine.

    python -m benchmarks.source_text OUT --megabytes 250 [--folders /usr/lib/python3 ...]

OUT becomes a data set of whole files in random order, for --dataset_name: its split `train` is that large.
One file in a hundred is in `test`, and then, up to --test_megabytes, all that follow. Files with equal
content appear once. The text has many licences, so it is for this machine only.
"""

from __future__ import annotations

import json
import random
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from fp8_suite.core.cli import as_command, command_parser

PROG = "python -m benchmarks.source_text"
SUFFIXES = {".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".cuh", ".cu", ".cpp", ".c"}
SMALLEST, LARGEST = 2**10, 2**18  # bytes; larger files are mostly tables
EVERY = 100  # one file in so many is for the test split


def texts(folders: list[str]) -> Iterator[str]:
    """Yield the texts of the folders' files in random order, each once."""
    files = (path.resolve() for folder in folders for path in Path(folder).rglob("*"))
    order, seen = sorted({path for path in files if path.suffix in SUFFIXES}), set()
    random.Random(0).shuffle(order)
    for path in order:
        try:
            if not (path.is_file() and SMALLEST <= path.stat().st_size <= LARGEST):
                continue
            text = path.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if hash(text) not in seen:
            seen.add(hash(text))
            yield text


@as_command
def main(argv: list[str]) -> int:
    """Collect the text. Exit codes: 0 done, 1 too little text, 2 bad setting."""
    parser = command_parser(PROG, __doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="new folder")
    parser.add_argument("--megabytes", type=float, required=True, metavar="X", help="text of the split train")
    parser.add_argument(
        "--test_megabytes", type=float, default=0.0, metavar="X", help="least text of the split test"
    )
    here = sorted({*site.getsitepackages(), sysconfig.get_path("stdlib"), "/usr/include", "/usr/share/doc"})
    text = f"folders (default: {' '.join(here)})"
    parser.add_argument("--folders", nargs="+", default=here, metavar="DIR", help=text)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True)
    written, wanted = {"train": 0, "test": 0}, {"train": args.megabytes, "test": args.test_megabytes}

    def full(*splits: str) -> bool:
        return all(written[split] >= wanted[split] * 1e6 for split in splits)

    with (args.out / "train.jsonl").open("w") as train, (args.out / "test.jsonl").open("w") as test:
        for number, text in enumerate(texts(args.folders)):
            for_test = number % EVERY == 0 or full("train")
            split, file = ("test", test) if for_test else ("train", train)
            file.write(json.dumps({"text": text}) + "\n")
            written[split] += len(text.encode("utf-8"))
            if full("train", "test"):
                break
    print(", ".join(f"{split}: {written[split] / 1e6:.1f} of {wanted[split]:.1f} MB" for split in wanted))
    if full("train", "test"):
        return 0
    print("the folders have no more text", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
