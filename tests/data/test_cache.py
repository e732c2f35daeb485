"""Full disks, unwritable caches, truncated cache files, and tokenization processes that are killed."""

import errno
import os
import signal

import datasets
import pyarrow as pa
import pytest
from datasets import Dataset
from datasets.arrow_writer import ArrowWriter, SchemaInferenceError
from datasets.packaged_modules.text.text import Text
from fp8_suite.core.errors import UserError
from fp8_suite.core.files import NOT_WRITABLE
from fp8_suite.data.reading.sources import open_path_or_hub
from fp8_suite.data.settings import DataConfig

from tests.data.conftest import json_lines

ROWS = json_lines(*[{"text": f"row {i}"} for i in range(3)])


@pytest.fixture
def stored(tmp_path, cache):
    """Data file with cached rows but no cached tokens."""
    (tmp_path / "rows.jsonl").write_bytes(ROWS)
    settings = {"dataset_name": str(tmp_path / "rows.jsonl"), "split_name": "train"}
    open_path_or_hub(DataConfig(**settings), "train")
    return settings


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("processes", [0, 1, 2])  # that tokenize; 0: the error occurs when rows are stored
def test_unwritable_cache_is_reported(build, load, stored, cache, monkeypatch, number, processes):
    def write_table(*_):
        raise OSError(number, os.strerror(number), *([f"{cache}/file"] if number in NOT_WRITABLE else []))

    monkeypatch.setattr(ArrowWriter, "write_table", write_table)
    way_out = "set HF_DATASETS_CACHE to a writable" if number in NOT_WRITABLE else "free disk space, or set"
    with pytest.raises(UserError, match=f"^{cache}.*: {os.strerror(number)}; {way_out}"):
        build(**stored, num_proc=processes) if processes else load(ROWS)
    assert not list(cache.rglob("tmp*"))


def test_cache_in_an_unwritable_folder_is_reported(stored, cache, monkeypatch):
    def makedirs(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(cache.parent))  # as when HF_HOME is missing

    monkeypatch.setattr(os, "makedirs", makedirs)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache / "new" / "datasets")
    with pytest.raises(UserError, match=f"^{cache.parent}: .*; set HF_DATASETS_CACHE to a writable folder"):
        open_path_or_hub(DataConfig(**stored), "train")


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("keep", [0.0, 0.5, "a batch"])
def test_truncated_token_files_are_recreated(load, build, tmp_path, cache, caplog, keep, processes):
    contents = json_lines(*[{"text": f"row {i}"} for i in range(2500)])
    complete = load(contents, num_proc=processes).train.identity
    file = sorted(cache.glob("tokenize_*/cache-*.arrow"))[-1]
    written = file.read_bytes()
    if keep == "a batch":
        with pa.memory_map(str(file)) as mapped:
            pa.ipc.open_stream(mapped).read_next_batch()
            file_end = mapped.tell()
        file.write_bytes(written[:file_end])
        assert len(Dataset.from_file(str(file))) == 1000, "read without an error"
    else:
        file.write_bytes(written[: int(keep * len(written))])
    path = str(tmp_path / "set" / "train.jsonl")
    loaders = build(dataset_name=path, split_name="train", packing=False, num_proc=processes)
    assert loaders.train.identity == complete
    assert caplog.text.count(f"{file}: truncated, deleting it; its rows are tokenized again") == 1
    assert file.read_bytes() == written


def test_killed_tokenizing_process_leaves_no_file(build, stored, cache, monkeypatch):
    monkeypatch.setattr(ArrowWriter, "write_table", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    (folder,) = {path.parent for path in cache.rglob("*.arrow")}
    (folder / "tmp_of_another").touch()
    with pytest.raises(UserError, match=r"^--num_proc 2: .*abruptly died.*lower --num_proc$"):
        build(**stored, num_proc=2)
    assert [path.name for path in cache.rglob("tmp*")] == ["tmp_of_another"]


def test_interrupt_wrapped_by_datasets_is_raised_as_interrupt(load, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt
        yield

    def hidden(*_):
        raise SchemaInferenceError("no rows")

    monkeypatch.setattr(Text, "_generate_tables", interrupted)
    monkeypatch.setattr(ArrowWriter, "finalize", hidden)
    with pytest.raises(KeyboardInterrupt):
        load(ROWS)
