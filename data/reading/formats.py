"""File formats. Register new formats in FORMATS, new compressions in COMPRESSIONS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8_suite.core.errors import bad_setting
from fp8_suite.data.settings import DataConfig

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

REPLACE = {"encoding_errors": "replace"}  # undecodable bytes become U+FFFD, which marks the row as bad
TEXT = {"encoding": "utf-8-sig", **REPLACE}  # skips a byte-order mark


@dataclass(frozen=True)
class Format:
    builder: str  # dataset builder of `datasets`
    options: dict[str, Any] = field(default_factory=dict)
    json_lines: bool = False  # read as text and parsed per row, so that a malformed line costs one row only


FORMATS = {
    ".jsonl": Format("text", TEXT, json_lines=True),
    ".json": Format("json"),
    # By default a batch has as many rows as the file's first row group, which is refused if that is empty.
    ".parquet": Format("parquet", {"batch_size": 1000}),
    ".csv": Format("csv", REPLACE),
    ".tsv": Format("csv", {"sep": "\t", **REPLACE}),
    ".txt": Format("text", TEXT),
}
COMPRESSIONS = (".gz", ".bz2", ".xz")


def common_format(files: Sequence[str]) -> Format | None:
    """Return the files' common format, ignoring compression; None if they have none."""
    paths = [Path(file) for file in files]
    suffixes = {(path.with_suffix("") if path.suffix in COMPRESSIONS else path).suffix for path in paths}
    return FORMATS.get(suffixes.pop().lower()) if len(suffixes) == 1 else None


def name_and_configuration(cfg: DataConfig) -> tuple[str, str | None]:
    """Split NAME:CONFIGURATION; an existing path is never split."""
    name, _, configuration = cfg.dataset_name.rpartition(":")
    if not name or not configuration or "/" in configuration or Path(cfg.dataset_name).expanduser().exists():
        return cfg.dataset_name, None
    return name, configuration


def named_file(cfg: DataConfig) -> str | None:
    """Return the data file that --dataset_name names, or None for a folder or hub id."""
    name, configuration = name_and_configuration(cfg)
    path = Path(name).expanduser()
    try:
        is_file = path.is_file()
    except OSError as error:  # no permission
        raise bad_setting(f"{error.strerror}; check the path", dataset_name=cfg.dataset_name) from None
    is_data = common_format([name]) is not None
    if is_data and not is_file:
        raise bad_setting("no such file; check the path", dataset_name=cfg.dataset_name)
    if is_file and (configuration or not is_data):
        reason = f"not a data file ({', '.join(FORMATS)}, also with {', '.join(COMPRESSIONS)})"
        raise bad_setting(f"{reason}; give one, without :CONFIGURATION", dataset_name=cfg.dataset_name)
    return str(path) if is_file else None


def read_files(format: Format, files: Sequence[str], **options: Any) -> Dataset | IterableDataset:
    """Read files of one format; `options` are passed to `datasets.load_dataset`."""
    if all(Path(file).is_file() and not Path(file).stat().st_size for file in files):
        raise EOFError(f"{Path(files[0]).name} is empty")
    if format.builder == "csv":
        options |= cells_as_text(files[0], format.options)
    import datasets  # settings are checked without it

    return datasets.load_dataset(format.builder, **format.options, **options)


def cells_as_text(file: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return options for the csv builder to read every cell as text, which keeps 007 and NA unchanged.

    `options` are pandas' for reading `file`. ValueError if the first row has more cells than the header:
    pandas would shift the columns.
    """
    import pandas as pd
    from datasets import Features, Value

    first = pd.read_csv(file, **options | REPLACE | {"nrows": 1, "chunksize": None})
    if len(first) and options.get("index_col") is None and not isinstance(first.index, pd.RangeIndex):
        raise ValueError("row 1 has more cells than the header; quote cells that contain the separator")
    return {"keep_default_na": False, "features": Features({str(n): Value("string") for n in first.columns})}
