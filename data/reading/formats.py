"""File formats. Register new formats in FORMATS, new compressions in COMPRESSIONS."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
from datasets import Dataset, Features, IterableDataset, Value

REPLACE = {"encoding_errors": "replace"}  # undecodable bytes become U+FFFD, which marks the row as bad
TEXT = {"encoding": "utf-8-sig", **REPLACE}  # skips a byte-order mark

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Format:
    builder: str  # dataset builder of `datasets`
    options: dict[str, Any] = field(default_factory=dict)
    json_lines: bool = False  # read as text and parsed per row, so that a malformed line costs one row only


FORMATS = {
    ".jsonl": Format("text", TEXT, json_lines=True),
    ".json": Format("json"),
    ".parquet": Format("parquet"),
    ".csv": Format("csv", REPLACE),
    ".tsv": Format("csv", {"sep": "\t", **REPLACE}),
    ".txt": Format("text", TEXT),
}
COMPRESSIONS = (".gz", ".bz2", ".xz")


def common_format(files: Sequence[str]) -> Format | None:
    """Return the files' common format, ignoring compression; None if they have none."""
    paths = [Path(file) for file in files]
    suffixes = {(path.with_suffix("") if path.suffix in COMPRESSIONS else path).suffix for path in paths}
    return FORMATS.get(suffixes.pop()) if len(suffixes) == 1 else None


def read_files(format: Format, files: Sequence[str], **options: Any) -> Dataset | IterableDataset:
    """Read files of one format; `options` are passed to `datasets.load_dataset`."""
    if all(Path(file).is_file() and not Path(file).stat().st_size for file in files):
        raise EOFError(f"{Path(files[0]).name} is empty")
    if format.builder == "csv":
        options |= cells_as_text(files[0], format.options)
    return datasets.load_dataset(format.builder, **format.options, **options)


def cells_as_text(file: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return options for the csv builder to read every cell as text, which keeps 007 and NA unchanged.

    `options` are the pandas options used to read the header of `file`.
    """
    try:
        header = pd.read_csv(file, **options | REPLACE | {"nrows": 0, "chunksize": None})
        written = pd.read_csv(file, **options | REPLACE | {"header": None, "nrows": 1, "chunksize": None})
    except ValueError:  # an archive of several tables
        return {}
    if options.get("header", "infer") == "infer" and options.get("names") is None:
        cells = written.iloc[0].tolist() if len(written) else []
        for name in sorted({str(cell) for cell in cells if cells.count(cell) > 1}):
            logger.warning("%s: several columns are called %s; the first is used", file, name)
    return {"keep_default_na": False, "features": Features({str(n): Value("string") for n in header.columns})}
