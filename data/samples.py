"""Tokenised rows, stored once, and the samples of a run as slices of them.

Tokenisation depends on the rows, the tokenizer and the prompt format alone; lengths, held-out part and loss
on prompts are applied to its result. So its cache serves every seed, length and batch size.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features
from datasets.fingerprint import Hasher
from datasets.table import InMemoryTable
from filelock import FileLock
from multiprocess import get_start_method, parent_process
from multiprocess.util import register_after_fork

from core.machine import cores
from data import chat, packing, sources
from data.cache import cache_folder, delete_cut_off, storing
from data.chat import COLUMNS, Encoder, Row, Status
from data.collate import Sample
from data.settings import DataConfig
from data.sources import Source

BAD_ROWS = "not JSON, not text, not UTF-8 or refused by the chat template"
ROWS_PER_PROCESS = 1000  # below this a process costs more to start than it saves
SECONDS_TO_OUTLIVE = 0.5  # for a process whose parent is gone


@dataclass(frozen=True)
class DataReport:
    """What became of the rows of one split, and what a pass over it holds (of a stream: its first window).

    rows == used + empty + overlong_dropped + without_label + bad_rows.
    """

    rows: int
    used: int
    empty: int
    overlong_dropped: int
    overlong_truncated: int  # part of `used`
    without_label: int  # nothing to predict: no assistant turn, or one token
    bad_rows: int  # not text, not UTF-8, not JSON, or refused by the chat template
    tokens: int
    label_tokens: int
    sequences: int  # packed sequences in the first epoch; samples when not packing
    packing_efficiency: float  # tokens / (tokens and padding), 0 to 1
    columns: str = ""  # which were taken, and the system prompt
    fingerprint: str = ""  # of the samples in their order, the same on every machine
    first_bad_row: str | None = None  # its number, from 1, and what is wrong with it
    streaming: bool = False
    rows_per_second: float | None = None  # of tokenisation, if this process did it: not a cache, not a stream
    processes: int | None = None  # that did it

    def lines(self, after: DataReport | None = None) -> list[str]:
        """For people: one line of what is used, one of its columns, and one of what is not used, if any is.

        Columns are left out if they are those of the report `after` which this one is printed.
        """
        scope = " in the stream's first window" if self.streaming else ""
        share = self.label_tokens / max(self.tokens, 1)
        lines = [
            f"{self.used:,} of {self.rows:,} rows{scope}: {self.tokens:,} tokens ({share:.1%} with loss) in "
            f"{self.sequences:,} sequences, {self.packing_efficiency:.1%} full"
        ]
        reasons = {
            "empty": self.empty,
            "over --max_seq_length, dropped": self.overlong_dropped,
            "over --max_seq_length, cut": self.overlong_truncated,
            "without a token to predict": self.without_label,
            f"{BAD_ROWS} ({self.first_bad_row})": self.bad_rows,
        }
        found = [f"{count:,} {reason}" for reason, count in reasons.items() if count]
        if self.rows_per_second:
            by = f"{self.processes} processes" if self.processes > 1 else "one process"
            lines[0] += f"; tokenised by {by} at {self.rows_per_second:,.0f} rows/s"
        if after is None or after.columns != self.columns:
            lines.append(f"columns: {self.columns}")
        return lines + ([f"rows left out or cut: {'; '.join(found)}"] if found else [])

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Samples:
    """The samples of one split: slices `start[i]`, `length[i]` of tokenised documents, int64 arrays."""

    tokens: Dataset  # ids and spans, in Arrow's format
    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    row: np.ndarray
    spans_all: bool  # every token carries loss

    def __len__(self) -> int:
        return len(self.document)

    def fetch(self, indices: list[int]) -> list[Sample]:
        if not indices:
            return []
        table = self.tokens[self.document[indices].tolist()]
        found = []
        for i, ids, spans in zip(indices, arrays(table["input_ids"]), arrays(table["spans"]), strict=True):
            loss = np.full(len(ids), self.spans_all)
            for start, stop in spans.reshape(-1, 2):
                loss[start:stop] = True
            piece = slice(self.start[i], self.start[i] + self.length[i])
            found.append(Sample(ids[piece], loss[piece], int(self.row[i])))
        return found


def arrays(column: pa.ChunkedArray) -> list[np.ndarray]:
    """One array per entry of a list column."""
    lengths = pc.list_value_length(column).to_numpy()
    return np.split(pc.list_flatten(column).to_numpy(), np.cumsum(lengths)[:-1])


def count_labels(column: pa.ChunkedArray, limits: np.ndarray) -> np.ndarray:
    """Tokens with loss among each document's first `limits` [documents]; the first has no predictor."""
    spans = pc.list_flatten(column).to_numpy().reshape(-1, 2)
    owner = np.repeat(np.arange(len(column)), pc.list_value_length(column).to_numpy() // 2)
    counts = np.minimum(spans[:, 1], limits[owner]) - np.maximum(spans[:, 0], 1)
    return np.bincount(owner, weights=np.maximum(counts, 0), minlength=len(column)).astype(np.int64)


@dataclass(frozen=True)
class Selection:
    """A split's samples with their row counts by Status, label tokens and a fingerprint of the content."""

    samples: Samples
    counts: np.ndarray  # int64 [len(Status)], of rows
    label_tokens: int
    fingerprint: str
    first_bad: int | None  # number, from 0, of the first row that is BAD


inherited: list[Encoder] = []  # the last one is what processes forked from this one tokenise with


@contextmanager
def inheritable(encoder: Encoder) -> Iterator[Callable[..., pa.Table]]:
    """A function that does what `encoder` does, in this process and in those that it forks meanwhile.

    Those end with it: workers, and the manager of the queue by which they answer.

    It costs nothing to pickle, as `datasets` does for each process: a tokenizer of 128,256 tokens takes 0.1 s
    to write and 0.3 s to read, for each of 16.
    """
    if get_start_method() != "fork":
        yield encoder
        return
    inherited.append(encoder)
    register_after_fork(encoder, end_with_parent)
    try:
        yield encode_inherited
    finally:
        inherited.pop()


def end_with_parent(_: Encoder) -> None:
    """In a forked process, before its work: a thread ends it soon after its parent, however that ended.

    Linux's PR_SET_PDEATHSIG would kill it with the thread that forked it: a pool stops the one that replaces
    killed workers first, and then waits for a lock that a worker holds. Ctrl-C is for the parent to tell of.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process().pid

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(SECONDS_TO_OUTLIVE)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def encode_inherited(batch: dict[str, list], numbers: list[int]) -> pa.Table:
    return inherited[-1](batch, numbers)


@dataclass(frozen=True)
class Split:
    """One split's rows with all that makes samples of them."""

    cfg: DataConfig
    source: Source
    encoder: Encoder
    vocab_size: int
    tokenised: dict[str, float] = field(default_factory=dict)  # of a `DataReport`, what the last call found

    def tokenise(self, rows: Dataset) -> Dataset:
        """COLUMNS of all samples in `rows`, read from the cache if they were made before.

        Of several processes that ask at once (the ranks of a node) one works and the others wait for its
        files. ValueError for a token id past the model's vocabulary.
        """
        processes = self.cfg.num_proc or min(len(cores()), 16, 1 + len(rows) // ROWS_PER_PROCESS)
        key = self._cache_key(rows)
        place = cache_folder(self.cfg) / f"tokenise_{key}"  # whoever holds its lock is alone in it
        with storing(self.cfg), FileLock(f"{place}.lock"), inheritable(self.encoder) as encode:
            began, start = time.time(), time.perf_counter()
            tokens = self._map(rows, encode, processes, place, key)
            seconds = time.perf_counter() - start
        files = [Path(file["filename"]) for file in tokens.cache_files]
        if len(rows) and all(file.stat().st_mtime >= began for file in files):
            self.tokenised.update(rows_per_second=len(rows) / seconds, processes=processes)
        self._check_vocabulary(tokens)
        return tokens

    def _map(
        self, rows: Dataset, encode: Callable[..., pa.Table], processes: int, place: Path, key: str
    ) -> Dataset:
        """`encode`d rows in files of the folder `place`, which hold all or are not left there."""
        place.mkdir(exist_ok=True)
        delete_cut_off(place)
        try:
            return rows.map(
                encode,
                batched=True,
                with_indices=True,
                remove_columns=rows.column_names,
                features=Features(COLUMNS),
                num_proc=processes if processes > 1 else None,
                cache_file_name=str(place / f"cache-{key}.arrow"),
                new_fingerprint=key,
                desc="tokenise",
            )
        except RuntimeError as error:
            if "abruptly died" not in str(error):
                raise
            raise RuntimeError(
                f"--num_proc {processes}: a tokenising process was killed, as a system does that is out of "
                "memory; lower --num_proc"
            ) from error
        finally:
            for unfinished in place.glob("tmp*"):
                unfinished.unlink(missing_ok=True)

    def _cache_key(self, rows: Dataset) -> str:
        # Not left to `datasets`, which hashes an imported function by its name and not by its code.
        tokenizer = self.encoder.tokenizer
        parts = (
            rows._fingerprint,
            tokenizer.backend_tokenizer.to_str(),
            (tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template),
            Hasher.hash(self.source.to_sample),
            [Path(module.__file__).read_bytes() for module in (chat, sources)],
        )
        return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()

    def encode(self, rows: list[Row], first: int) -> Selection:
        """The usable samples of rows in memory, the first of which is row number `first`."""
        tokens = Dataset(InMemoryTable(self.encoder.encode(rows, range(len(rows)))))
        self._check_vocabulary(tokens)
        return self.select(tokens, np.ones(len(rows), dtype=bool), first + np.arange(len(rows)))

    def sample(self, count: int) -> Selection:
        """At most `count` rows for evaluation: a stream's first, or else spread evenly over the split."""
        rows = self.source.rows
        if not isinstance(rows, Dataset):
            with sources.reading(self.cfg):
                first = list(islice(rows, count))
            return self.encode(first, 0)
        count = min(count, len(rows))
        numbers = np.arange(count) * len(rows) // max(count, 1)
        return self.select(self.tokenise(rows.select(numbers)), np.ones(count, dtype=bool), numbers)

    def _check_vocabulary(self, tokens: Dataset) -> None:
        top = tokens.data.column("top").to_numpy().max(initial=0)
        if top >= self.vocab_size:
            raise ValueError(
                f"--tokenizer_name {self.encoder.tokenizer.name_or_path}: token id {top} is past the "
                f"vocabulary of --model_name ({self.vocab_size} tokens); take the model's own tokenizer"
            )

    def select(self, tokens: Dataset, keep: np.ndarray, numbers: np.ndarray) -> Selection:
        """The usable samples of the rows in `keep`.

        `tokens` is `tokenise`'s result; `keep` bool [rows]; `numbers` int64 [rows], as samples report them.
        A chat over --max_seq_length is dropped or cut, whole rows at a time; plain text is split.
        """
        cfg, is_chat = self.cfg, self.source.chat
        column = {name: tokens.data.column(name) for name in COLUMNS}
        row, status, crc = (column[name].to_numpy() for name in ("row", "status", "crc"))
        status = status.astype(np.int64)
        length = pc.list_value_length(column["input_ids"]).to_numpy().astype(np.int64)
        overlong = (length > cfg.max_seq_length) & is_chat
        status[overlong] = Status.OVERLONG if cfg.overlong == "drop" else Status.TRUNCATED
        within = np.minimum(length, cfg.max_seq_length) if is_chat else length
        labels = np.maximum(within - 1, 0) if cfg.train_on_prompt else count_labels(column["spans"], within)
        status[(status <= Status.TRUNCATED) & (labels == 0)] = Status.WITHOUT_LABEL
        worst = np.zeros(len(keep), dtype=np.int64)
        np.maximum.at(worst, row, status)
        document = np.flatnonzero(keep[row] & (worst[row] <= Status.TRUNCATED))
        if is_chat:
            start, length = np.zeros(len(document), dtype=np.int64), within[document]
            label_tokens = int(labels[document].sum())
        else:
            piece, start, length = packing.split_lengths(length[document], cfg.max_seq_length)
            document = document[piece]
            label_tokens = int((length - 1).sum())
        samples = Samples(
            tokens.with_format("arrow", columns=["input_ids", "spans"]),
            document=document,
            start=start,
            length=length,
            row=numbers[row[document]],
            spans_all=cfg.train_on_prompt,
        )
        content = hashlib.blake2b(digest_size=8)
        for array in (crc[document], start, length, samples.row):
            content.update(np.ascontiguousarray(array).tobytes())
        counts = np.bincount(worst[keep], minlength=len(Status))
        bad = numbers[keep & (worst == Status.BAD)]
        first_bad = int(bad[0]) if len(bad) else None
        return Selection(samples, counts, label_tokens, content.hexdigest(), first_bad)

    def first_bad(self, selection: Selection) -> str | None:
        """Number of the selection's first bad row, from 1 as editors count, and what is wrong with it."""
        if (number := selection.first_bad) is None:
            return None
        rows = self.source.rows
        row = rows[number] if isinstance(rows, Dataset) else next(iter(islice(rows, number, None)))
        return f"{self.source.unit} {number + 1}: {self.encoder.why_bad(row)}"
