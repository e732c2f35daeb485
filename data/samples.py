"""Cache of tokenized rows, and a run's samples as slices of it.

Cached tokens depend only on the rows, the tokenizer and the prompt format. Maximum length, held-out rows and
loss on prompts are applied later, so one cache serves every seed, length and batch size.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features
from datasets.fingerprint import Hasher
from datasets.table import InMemoryTable
from filelock import FileLock
from fp8_suite.core.errors import UserError, bad_setting, first_line, raise_interrupt
from fp8_suite.core.machine import cores
from fp8_suite.data import chat, packing, rendering
from fp8_suite.data.chat import COLUMNS, Encoder
from fp8_suite.data.collate import Sample
from fp8_suite.data.reading import columns, rows
from fp8_suite.data.reading.rows import Row, Status
from fp8_suite.data.reading.sources import Source, cache_folder, explaining_read_errors, storage_error
from fp8_suite.data.settings import DataConfig
from multiprocess import parent_process
from multiprocess.util import register_after_fork

CODE = (chat, columns, rendering, rows)  # modules that determine the tokens of a row
ROWS_PER_PROCESS = 1000  # with fewer rows, starting a process takes longer than it saves
PARENT_CHECK_SECONDS = 0.5
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # last bytes of a complete Arrow stream

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples of one split: slices `start[i]`, `length[i]` of tokenized documents, int64 arrays."""

    tokens: Dataset  # ids and spans, in Arrow format
    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    row: np.ndarray
    loss_on_all: bool  # True if loss is computed on every token

    def __len__(self) -> int:
        return len(self.document)

    def fetch(self, indices: list[int]) -> list[Sample]:
        table = self.tokens[self.document[indices].tolist()]
        arrays = (table[name].to_numpy() for name in ("input_ids", "spans"))  # of arrays, one per document
        samples = []
        for i, ids, spans in zip(indices, *arrays, strict=True):
            loss = np.full(len(ids), self.loss_on_all)
            for start, stop in spans.reshape(-1, 2):
                loss[start:stop] = True
            piece = slice(self.start[i], self.start[i] + self.length[i])
            samples.append(Sample(ids[piece], loss[piece], int(self.row[i])))
        return samples


@dataclass(frozen=True, eq=False)
class Selection:
    """Usable samples among selected rows of a split, and counts of those rows."""

    samples: Samples
    counts: np.ndarray  # int64 [len(Status)], rows by status
    label_tokens: int
    fingerprint: str  # hash of the content
    first_bad_row: int | None  # number, starting at 0, of the first BAD row
    left_out: dict[str, int]  # part of an answer that the chat template leaves out -> number of rows


@dataclass(frozen=True)
class Split:
    """Rows of one split, with the settings and the encoder that convert them to samples."""

    cfg: DataConfig
    source: Source
    encoder: Encoder
    vocab_size: int

    def tokenize(self, rows: Dataset) -> Dataset:
        """Return a table of COLUMNS for `rows`, from the cache if it is there.

        If several processes (the ranks of a node) call this at once, one tokenizes and the others wait.
        """
        processes = self.cfg.num_proc or min(len(cores()), 16, 1 + len(rows) // ROWS_PER_PROCESS)
        key = self.cache_key(rows)
        folder = cache_folder() / f"tokenize_{key}"
        with FileLock(f"{folder}.lock"):
            folder.mkdir(exist_ok=True)
            delete_truncated(folder)
            tokens = self._map(rows, processes, folder / f"cache-{key}.arrow", key)
        self._check_vocabulary(tokens)
        return tokens

    def _map(self, rows: Dataset, processes: int, file: Path, key: str) -> Dataset:
        """Encode all rows into `file`, or into one file per process; delete partial files on failure."""
        register_after_fork(self.encoder, end_with_parent)
        try:
            return rows.map(
                self.encoder,
                batched=True,
                with_indices=True,
                remove_columns=rows.column_names,
                features=Features(COLUMNS),
                num_proc=processes if processes > 1 else None,
                cache_file_name=str(file),
                new_fingerprint=key,
                desc="tokenize",
            )
        except Exception as error:
            raise_interrupt(error)
            if (reason := storage_error(error)) is not None:
                raise reason from error
            # An error from a worker has the worker's traceback as its cause. No cause: a worker was killed.
            if isinstance(error, RuntimeError) and error.__cause__ is None and processes > 1:
                way_out = "The host may have run out of memory; lower --num_proc"
                raise UserError(f"--num_proc {processes}: {first_line(error)} {way_out}") from error
            raise
        finally:
            for partial in file.parent.glob("tmp*"):
                partial.unlink(missing_ok=True)

    def cache_key(self, rows: Dataset) -> str:
        """Return a hash of everything that tokens depend on, including the code that computes them."""
        tokenizer = self.encoder.tokenizer
        parts = (
            rows._fingerprint,
            tokenizer.backend_tokenizer.to_str(),
            (tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template),
            Hasher.hash(self.source.to_sample),
            [Path(module.__file__).read_bytes() for module in CODE],
        )
        return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()

    def encode(self, rows: list[Row], first: int) -> Selection:
        """Return the samples of consecutive rows of a stream, starting at row number `first`."""
        tokens = Dataset(InMemoryTable(self.encoder.encode(rows, range(len(rows)))))
        self._check_vocabulary(tokens)
        return self.select(tokens, np.ones(len(rows), dtype=bool), first + np.arange(len(rows)))

    def sample(self, count: int | None) -> Selection:
        """Select at most `count` rows (None: all): the first of a stream, else evenly spaced ones."""
        rows = self.source.rows
        if not isinstance(rows, Dataset):
            with explaining_read_errors(self.cfg):
                first = list(islice(rows, count))
            return self.encode(first, 0)
        count = len(rows) if count is None else min(count, len(rows))
        return self.take(np.arange(count) * len(rows) // max(count, 1))

    def take(self, numbers: np.ndarray) -> Selection:
        """Select rows by their ascending numbers, int64 [rows], and tokenize only these."""
        rows = self.source.rows
        tokens = self.tokenize(rows.select(numbers) if len(numbers) < len(rows) else rows)
        return self.select(tokens, np.ones(len(numbers), dtype=bool), numbers)

    def _check_vocabulary(self, tokens: Dataset) -> None:
        top = tokens.data.column("max_id").to_numpy().max(initial=0)
        if top >= self.vocab_size:
            reason = f"token id {top} exceeds the vocabulary of --model_name ({self.vocab_size} tokens)"
            name = self.encoder.tokenizer.name_or_path
            raise bad_setting(f"{reason}; use the model's own tokenizer", tokenizer_name=name)

    def select(self, tokens: Dataset, keep: np.ndarray, numbers: np.ndarray) -> Selection:
        """Return the usable samples of the rows in `keep`.

        `tokens`: result of `tokenize`. `keep`: bool [rows]. `numbers`: int64 [rows], row numbers in the data
        set. Chats over --max_seq_length are dropped (all samples of the row) or truncated; text is split.
        """
        cfg, is_chat = self.cfg, self.source.columns.chat
        column = {name: tokens.data.column(name) for name in COLUMNS}
        row, status, crc = (column[name].to_numpy() for name in ("row", "status", "crc"))
        status = status.astype(np.int64)
        length = pc.list_value_length(column["input_ids"]).to_numpy().astype(np.int64)
        overlong = (length > cfg.max_seq_length) & is_chat
        status[overlong] = Status.OVERLONG if cfg.overlong == "drop" else Status.TRUNCATED
        within = np.minimum(length, cfg.max_seq_length) if is_chat else length
        labels = np.maximum(within - 1, 0) if cfg.train_on_prompt else count_labels(column["spans"], within)
        status[(status <= Status.TRUNCATED) & (labels == 0)] = Status.WITHOUT_LABEL
        worst = np.zeros(len(keep), dtype=np.int64)  # [rows]
        np.maximum.at(worst, row, status)
        document = np.flatnonzero(keep[row] & (worst[row] <= Status.TRUNCATED))
        if is_chat:
            start, length = np.zeros(len(document), dtype=np.int64), within[document]
            label_tokens = int(labels[document].sum())
        else:
            piece, start, length = packing.split_lengths(length[document], cfg.max_seq_length)
            document = document[piece]
            label_tokens = int((length - 1).sum())
        table = tokens.with_format("arrow", columns=["input_ids", "spans"])
        samples = Samples(table, document, start, length, numbers[row[document]], cfg.train_on_prompt)
        content = hashlib.blake2b(digest_size=8)
        for array in (crc[document], start, length, samples.row):
            content.update(np.ascontiguousarray(array).tobytes())
        counts = np.bincount(worst[keep], minlength=len(Status))
        first_bad_row = next(iter(numbers[keep & (worst == Status.BAD)].tolist()), None)
        return Selection(
            samples,
            counts,
            label_tokens,
            content.hexdigest(),
            first_bad_row,
            left_out=count_rows_by_part(column["left_out"].take(document), row[document]),
        )

    def describe_first_bad(self, selection: Selection) -> str | None:
        """Return number (starting at 1, as in editors) and reason of the selection's first bad row."""
        if (number := selection.first_bad_row) is None:
            return None
        rows = self.source.rows
        row = rows[number] if isinstance(rows, Dataset) else next(islice(rows, number, None))
        return f"row {number + 1}: {self.encoder.draft(row).reason}"


def delete_truncated(folder: Path) -> None:
    """Delete truncated Arrow files: a file cut at a batch boundary would load without an error."""
    for path in folder.glob("*.arrow"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - len(END_OF_STREAM)))
            is_whole = file.read() == END_OF_STREAM
        if not is_whole:
            logger.warning("%s: truncated, deleting it; its rows are tokenized again", path)
            path.unlink(missing_ok=True)


def count_labels(column: pa.ChunkedArray, limits: np.ndarray) -> np.ndarray:
    """Count label tokens among each document's first `limits` tokens, without its very first token."""
    spans = pc.list_flatten(column).to_numpy().reshape(-1, 2)  # [spans, start and stop]
    owner = np.repeat(np.arange(len(column)), pc.list_value_length(column).to_numpy() // 2)
    counts = np.minimum(spans[:, 1], limits[owner]) - np.maximum(spans[:, 0], 1)
    return np.bincount(owner, weights=np.maximum(counts, 0), minlength=len(column)).astype(np.int64)


def count_rows_by_part(column: pa.ChunkedArray, rows: np.ndarray) -> dict[str, int]:
    """Return the number of rows by left-out part. `column`: names of parts, `rows`: row of each sample."""
    encoded = column.combine_chunks().dictionary_encode()  # few different values, mostly ""
    codes, counts = encoded.indices.to_numpy(), Counter()
    for code, names in enumerate(encoded.dictionary.to_pylist()):
        number = len(np.unique(rows[codes == code]))
        counts.update(dict.fromkeys(filter(None, names.split(", ")), number))
    return dict(counts)


def end_with_parent(_: Encoder) -> None:
    """Start a thread in a forked process that exits soon after the parent has ended for any reason.

    PR_SET_PDEATHSIG is no alternative: it fires when the forking thread ends. A closing pool ends the thread
    that forked replacement workers, which would kill them while they hold a lock that the pool waits for.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    parent = parent_process().pid

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
