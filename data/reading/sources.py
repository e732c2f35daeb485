"""Open the rows of a split.

Register data sets with a custom reader in DATASETS; `open_path_or_hub` reads all others.
"""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, IterableDataset
from datasets.data_files import FILES_TO_IGNORE
from fp8_suite.core.errors import UserError, bad_setting, causes, counted, one_line, raise_interrupt
from fp8_suite.core.files import DISK_FULL, NOT_WRITABLE
from fp8_suite.data import demo as demo_set
from fp8_suite.data.reading.columns import Columns, choose_columns
from fp8_suite.data.reading.formats import (
    FORMATS,
    Format,
    cells_as_text,
    common_format,
    name_and_configuration,
    named_file,
    read_files,
)
from fp8_suite.data.reading.rows import Row, arrow_row, drop_nulls, json_line, parse_line
from fp8_suite.data.settings import DataConfig
from huggingface_hub.constants import HF_HUB_CACHE

SAVED = ("dataset_dict.json", "state.json")  # files that `save_to_disk` writes
PEEK = 100  # rows searched for column names if no schema lists them

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Rows of one split, and the function that converts a row to a sample."""

    rows: Dataset | IterableDataset
    columns: Columns
    to_sample: Callable[[Row], Row]
    read_row: Callable[[Row], Any]  # returns all columns of a stored row


def demo(cfg: DataConfig, split: str) -> Source:
    """Read the demo set."""
    split = choose_split(cfg, split, demo_set.FILES)
    return source_of_files(cfg, FORMATS[".jsonl"], split, [str(demo_set.FILES[split])])


def open_path_or_hub(cfg: DataConfig, split: str) -> Source:
    """Read a file, a folder or a hub data set."""
    if file := named_file(cfg):
        return source_of_files(cfg, common_format([file]), choose_split(cfg, split, ["train"]), [file])
    name, configuration = name_and_configuration(cfg)
    path = Path(name).expanduser()
    name = str(path) if path.exists() else name
    if any((path / file).is_file() for file in SAVED):
        return source_of_saved(cfg, path, split)
    with explaining_read_errors(cfg):
        builder = datasets.load_dataset_builder(name, configuration)
    splits = {str(key): list(value) for key, value in (builder.config.data_files or {}).items()}
    if path.is_dir() and split == cfg.split_name and len(builder.builder_configs) < 2:
        warn_of_unread_files(path, chain.from_iterable(splits.values()))
    split = choose_split(cfg, split, splits) if splits else split
    files = splits.get(split, [])
    format = common_format(files)
    if format and format.json_lines:
        return source_of_files(cfg, format, split, files)
    options = load_options(cfg, split, files)
    with explaining_read_errors(cfg):
        if builder.name == "csv" and files and Path(files[0]).is_file():
            options |= cells_as_text(files[0], builder.config.pd_read_csv_kwargs)
        elif builder.name == "parquet":
            options |= FORMATS[".parquet"].options
        return source_of_rows(cfg, datasets.load_dataset(name, configuration, **options))


DATASETS: dict[str, Callable[[DataConfig, str], Source]] = {"demo": demo}


def open_source(cfg: DataConfig, split: str) -> Source:
    """Open a split of --dataset_name. UserError if it cannot be read or has no rows."""
    source = DATASETS.get(cfg.dataset_name, open_path_or_hub)(cfg, split)
    if isinstance(source.rows, Dataset) and not len(source.rows):
        raise without_rows(cfg, split)
    return source


def without_rows(cfg: DataConfig, split: str) -> UserError:
    """Return the error of an empty split."""
    return bad_setting(f"split {split} has no rows; choose another split", dataset_name=cfg.dataset_name)


def source_of_files(cfg: DataConfig, format: Format, split: str, files: list[str]) -> Source:
    """Read files of one format."""
    with explaining_read_errors(cfg):
        rows = read_files(format, files, **load_options(cfg, split, files))
        if not format.json_lines:
            return source_of_rows(cfg, rows)
        lines = [parse_line(row) for row in islice((row for row in rows if row["text"].strip()), PEEK)]
    objects = [line for line in lines if isinstance(line, dict)]
    if not objects:
        reason = f"no line can be read as a JSON object in UTF-8 (the first: {next(iter(lines), 'blank')})"
        way_out = "a file with one list of rows must be called .json"
        raise bad_setting(f"{reason}; {way_out}", dataset_name=cfg.dataset_name)
    columns = choose_columns(cfg, first_keys(objects), objects)
    return Source(rows, columns, partial(json_line, columns.to_sample), parse_line)


def warn_of_unread_files(folder: Path, read: Iterable[str]) -> None:
    """Warn of a folder's data files that `datasets` assigns to no split, by their format or name."""
    known = {Path(file).resolve() for file in read}
    names = [name for name in glob.glob("**", root_dir=folder, recursive=True) if common_format([name])]
    notes = {name for name in names if name.endswith(".txt") or Path(name).name in FILES_TO_IGNORE}
    if unread := [name for name in sorted({*names} - notes) if (folder / name).resolve() not in known]:
        message = "WARNING: --dataset_name %s: %s not read, by format or name: %s"
        logger.warning(message, folder, counted(len(unread), "file"), ", ".join(unread[:5]))


def source_of_saved(cfg: DataConfig, folder: Path, split: str) -> Source:
    """Read a Dataset or DatasetDict written by `save_to_disk`."""
    with explaining_read_errors(cfg):
        saved = datasets.load_from_disk(str(folder))
    splits = saved if isinstance(saved, dict) else {str(saved.split or "train"): saved}
    rows = splits[choose_split(cfg, split, splits)]
    return source_of_rows(cfg, rows.to_iterable_dataset() if cfg.streaming else rows)


def source_of_rows(cfg: DataConfig, rows: Dataset | IterableDataset) -> Source:
    columns = choose_columns(cfg, rows.column_names or first_keys(rows), islice(rows, PEEK))
    return Source(rows, columns, partial(arrow_row, columns.to_sample), drop_nulls)


def first_keys(rows: Iterable[Row]) -> list[str]:
    """Return the union of the keys in the first rows."""
    return list(dict.fromkeys(chain.from_iterable(islice(rows, PEEK))))


def load_options(cfg: DataConfig, split: str, files: list[str]) -> dict[str, Any]:
    """Return options for `load_dataset` that read only the split's files, if they are known.

    Otherwise `load_dataset` downloads all splits: OpenMathInstruct-2's `train` is 14 times its `train_1M`.
    """
    options = {"split": split, "streaming": cfg.streaming}
    # `datasets` reads names as patterns, in which the brackets of data[1].jsonl are special.
    names = [glob.escape(file) if Path(file).is_file() else file for file in files]
    return options | ({"data_files": {split: names}, "verification_mode": "no_checks"} if files else {})


def choose_split(cfg: DataConfig, split: str, splits: Iterable[str]) -> str:
    """Return `split`, or the only split if the default one is missing. UserError for an unknown split."""
    known = list(splits)
    if split in known:
        return split
    if split == DataConfig().split_name and len(known) == 1 and known != [cfg.eval_split]:
        message = "--split_name %s: no such split in %s; using its only split, %s"
        logger.warning(message, split, cfg.dataset_name, *known)
        return known[0]
    flag = "eval_split" if split == cfg.eval_split else "split_name"
    reason = f"no such split in --dataset_name {cfg.dataset_name}; it has {', '.join(known)}"
    raise bad_setting(reason, **{flag: split})


@contextmanager
def explaining_read_errors(cfg: DataConfig) -> Iterator[None]:
    """Convert any error raised while reading rows (`datasets`, hub client, parser) to a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise_interrupt(error)
        raise storage_error(error) or unreadable(cfg, error) from error


def cache_folder() -> Path:
    return Path(datasets.config.HF_DATASETS_CACHE)


def storage_error(error: BaseException) -> UserError | None:
    """Return a UserError if the cause is a full disk or a read-only cache; None for other errors."""
    folder = cache_folder()
    for origin in causes(error):
        if not isinstance(origin, OSError):
            continue
        reason = f"{origin.filename or folder}: {origin.strerror}"
        if origin.errno in DISK_FULL:
            caches = f"HF_DATASETS_CACHE (now {folder}) and, for downloads, HF_HUB_CACHE (now {HF_HUB_CACHE})"
            return UserError(f"{reason}; free disk space, or set {caches} to folders with more space")
        path = Path(str(origin.filename))  # of the folders to create, the first fails
        if origin.errno in NOT_WRITABLE and (folder in (path, *path.parents) or path in folder.parents):
            return UserError(f"{reason}; set HF_DATASETS_CACHE to a writable folder")
    return None


def unreadable(cfg: DataConfig, error: Exception) -> UserError:
    """Return the UserError for rows that cannot be read."""
    cause: BaseException = error
    while isinstance(cause, datasets.exceptions.DatasetGenerationError) and cause.__cause__:
        cause = cause.__cause__
    if empty := re.fullmatch(r'Instruction "(.*)" corresponds to no data!', one_line(cause)):
        return without_rows(cfg, empty[1])
    check = "the name and the network"
    if Path(name_and_configuration(cfg)[0]).expanduser().exists():
        check = "that all files are complete and the files of a split have equal columns"
    way_out = f"check {check}; NAME:CONFIGURATION chooses one of several configurations"
    return bad_setting(f"cannot be read: {one_line(cause)}; {way_out}", dataset_name=cfg.dataset_name)
