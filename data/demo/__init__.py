"""Demo data: 6,500 word problems in the format of OpenMathInstruct-2, and a tokenizer trained on them.

The problems are generated from 14 templates with random names and numbers.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
TOKENIZER_DIR = FOLDER / "tokenizer"
FILES = {split: FOLDER / f"{split}.jsonl.xz" for split in ("train_1M", "test")}


def read_demo(split: str) -> Iterator[dict[str, str]]:
    """Yield the rows of `train_1M` or `test`."""
    with lzma.open(FILES[split], "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)
