"""Data pipeline, from the name of a data set to resumable micro-batches on each rank.

The modules, in order of data flow:

- `sources` opens the rows. Register a new data set in DATASETS, a new file format in `formats.FORMATS`.
- `synthetic` makes up rows of random words.
- `columns` chooses the columns to train on. Register new column names in KNOWN_COLUMNS.
- `rows` converts rows to samples.
- `tokenizer` loads the tokenizer and supplies missing chat templates. Register new ones in TEMPLATES.
- `rendering` renders chats and finds the answers in them.
- `chat` tokenizes samples.
- `samples` caches tokens and selects samples.
- `packing` fills bins.
- `order` assigns bins to ranks.
- `collate` builds tensors.
- `loader` iterates over micro-batches and resumes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import numpy as np
from datasets import Dataset
from fp8_suite.core.errors import bad_setting, counted
from fp8_suite.data import synthetic
from fp8_suite.data.chat import Encoder
from fp8_suite.data.loader import Loader
from fp8_suite.data.order import BatchLayout, BatchShape, Stored, Stream
from fp8_suite.data.packing import permutation
from fp8_suite.data.reading.rows import Row, Status
from fp8_suite.data.reading.sources import choose_split, open_source, source_of_rows
from fp8_suite.data.report import DataReport, report_on
from fp8_suite.data.samples import Selection, Split
from fp8_suite.data.settings import DataConfig
from transformers import PreTrainedTokenizerBase

NUM_PROMPTS = 256  # held-out prompts kept for sample answers
HELD_OUT_KEY = 2**32 - 1  # shuffling key of the held-out part, different from every epoch number

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaders:
    """Loaders of a run, and reports on their data."""

    train: Loader | None  # None in a run that only evaluates
    eval: Loader | None  # None without evaluation data
    report: DataReport | None
    eval_report: DataReport | None
    eval_prompts: list[tuple[str, str]]  # (rendered prompt, reference answer); [] for plain text

    @property
    def eval_fingerprint(self) -> Any:
        """Fingerprint of the evaluation samples, or None without evaluation."""
        return None if self.eval is None else self.eval.identity["samples"]

    @property
    def identity(self) -> dict[str, Any]:
        """Identity of all data, which must be the same on every rank."""
        batches = None if self.eval is None else self.eval.micro_batches_per_epoch
        return (self.train.identity if self.train else {}) | {"evaluation": [self.eval_fingerprint, batches]}


def build_loaders(
    cfg: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    shape: BatchShape,
    *,
    seed: int,
    vocab_size: int,
    max_positions: int | None,
    evaluate_only: Literal["model", "checkpoint"] | None = None,
) -> Loaders:
    """Open, tokenize (or read from the cache), split and pack the data; every rank computes the same order.

    `vocab_size` and `max_positions` are the model's. With `evaluate_only` (of a model, or of a run's
    checkpoint) there is no training data. UserError for settings or data that cannot be used.
    """
    cfg.check_length(max_positions)
    layout = build_layout(cfg, tokenizer, shape, vocab_size)
    if evaluate_only:
        split, selected = evaluated_rows(
            cfg, tokenizer, vocab_size, seed, of_run=evaluate_only == "checkpoint"
        )
        return with_evaluation(split, selected, layout)
    check_splits(cfg)
    split = open_split(cfg, cfg.split_name, tokenizer, vocab_size)
    warn_about_template(split)
    num_held_out = cfg.num_eval_samples if cfg.eval_split is None else 0
    eval_split = split
    if cfg.eval_split is not None and cfg.num_eval_samples:  # before tokenization: a wrong name fails early
        eval_split = open_split(cfg, cfg.eval_split, tokenizer, vocab_size)
    source: Stored | Stream
    if cfg.streaming:
        source = Stream(split, layout, seed=seed, held_out=num_held_out)
        train = source.selection
        held_out = split.sample(num_held_out) if num_held_out else None
    else:
        train, held_out = split_train_eval(split, num_held_out, seed)
        source = Stored(train.samples, layout, seed=seed)
    require_usable(split, train, split_name=cfg.split_name)
    require_full_step(source)
    if eval_split is not split:
        held_out = eval_split.sample(cfg.num_eval_samples)
        require_usable(eval_split, held_out, eval_split=cfg.eval_split)
    identity = {"samples": train.fingerprint, "seed": seed}
    identity |= {name: getattr(cfg, name) for name in ("max_seq_length", "packing", "streaming")}
    loader, report = Loader(source, identity=identity), report_on(split, train, source)
    return with_evaluation(eval_split, held_out, layout, loader, report)


def evaluated_rows(
    cfg: DataConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int, seed: int, *, of_run: bool
) -> tuple[Split, Selection | None]:
    """Return the split and rows of a run that only evaluates; no other rows are tokenized.

    A model is evaluated on the rows of --eval_split, or of --split_name without one: all of them, unless
    --eval_samples is given or they are streamed. With `of_run`, a checkpoint is evaluated on the rows that
    its run held out or sampled.
    """
    flag = "split_name" if cfg.eval_split is None else "eval_split"
    split = open_split(cfg, getattr(cfg, flag), tokenizer, vocab_size)
    warn_about_template(split)
    if of_run and cfg.eval_split is None and not cfg.streaming:
        numbers = np.flatnonzero(held_out_rows(split, cfg.num_eval_samples, seed))
        return split, split.take(numbers) if len(numbers) else None
    is_limited = of_run or cfg.streaming or cfg.eval_samples is not None
    selected = split.sample(cfg.num_eval_samples if is_limited else None)
    require_usable(split, selected, **{flag: getattr(cfg, flag)})
    return split, selected


def with_evaluation(
    split: Split,
    selected: Selection | None,
    layout: BatchLayout,
    train: Loader | None = None,
    report: DataReport | None = None,
) -> Loaders:
    """Add the loader of the selected evaluation rows to that of the training rows."""
    if selected is not None and not len(selected.samples):
        logger.warning("all held-out rows are unusable: this run has no evaluation")
        selected = None
    if selected is None:
        return Loaders(train, None, report, None, [])
    batches = {"batch_size": layout.shape.eval_batch_size, "micro_batches_per_step": 1}
    layout = replace(layout, shape=replace(layout.shape, **batches))
    source = Stored(selected.samples, layout, seed=None)
    loader = Loader(source, identity={"samples": selected.fingerprint}, restart=True)
    eval_report = report_on(split, selected, source)
    return Loaders(train, loader, report, eval_report, evaluation_prompts(split, selected))


def build_layout(
    cfg: DataConfig, tokenizer: PreTrainedTokenizerBase, shape: BatchShape, vocab_size: int
) -> BatchLayout:
    pads = [tokenizer.pad_token_id, tokenizer.eos_token_id]  # an added token may have no embedding
    return BatchLayout(cfg, shape, next((pad for pad in pads if pad is not None and pad < vocab_size), 0))


def check_splits(cfg: DataConfig) -> None:
    """Raise UserError if the evaluation split is the training split; warn if they may share rows."""
    if (name := cfg.eval_split) is None:
        return
    if name == cfg.split_name:
        way_out = "omit the flag to hold out part of the training split"
        raise bad_setting(f"is the training split; {way_out}", eval_split=name)
    # In OpenMathInstruct-2, train_1M is a subset of train.
    if name.startswith("train") and cfg.split_name.startswith("train"):
        logger.warning("--eval_split %s: may share rows with --split_name %s", name, cfg.split_name)


def open_split(cfg: DataConfig, name: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Split:
    if cfg.dataset_name == synthetic.NAME:
        choose_split(cfg, name, [cfg.split_name])
        source = source_of_rows(cfg, synthetic.random_words(cfg, tokenizer))
    else:
        source = open_source(cfg, name)
    columns = source.columns
    encoder = Encoder(tokenizer, source.to_sample, chat=columns.chat, system=columns.system)
    return Split(cfg, source, encoder, vocab_size)


def warn_about_template(split: Split) -> None:
    """Warn if the chat template has no end-of-turn token, or drops the tools in the data."""
    columns, encoder, problems = split.source.columns, split.encoder, []
    if columns.chat and encoder.turn_end is None:
        problems.append("ends answers without a special token, so the model does not learn where to stop")
    if columns.tools and not encoder.renders_tools:
        problems.append("does not render tools: the tools in the data are ignored")
    for problem in problems:
        logger.warning("--tokenizer_name %s: its chat template %s", encoder.tokenizer.name_or_path, problem)


def split_train_eval(split: Split, num_held_out: int, seed: int) -> tuple[Selection, Selection | None]:
    """Split rows at random into training rows and `num_held_out` evaluation rows, at most 10 % of all."""
    held_out = held_out_rows(split, num_held_out, seed)
    numbers = np.arange(len(held_out))
    rows = split.source.rows
    tokens = split.tokenize(rows.select(range(len(numbers))) if len(numbers) < len(rows) else rows)
    evaluation = split.select(tokens, held_out, numbers) if held_out.any() else None
    return split.select(tokens, ~held_out, numbers), evaluation


def held_out_rows(split: Split, num_held_out: int, seed: int) -> np.ndarray:
    """Return a mask of the rows that are held out for evaluation, bool [rows used]."""
    num_rows, limit = len(split.source.rows), split.cfg.num_of_samples
    count = min(num_held_out, num_rows // 10)
    if num_held_out and not count:
        logger.warning("%s: too few for a held-out set; this run has no evaluation", counted(num_rows, "row"))
    held_out = np.zeros(num_rows if limit is None else min(num_rows, limit + count), dtype=bool)
    held_out[permutation(len(held_out), seed, HELD_OUT_KEY)[:count]] = True
    return held_out


def require_usable(split: Split, selection: Selection, **flag: str | None) -> None:
    """Raise UserError if no selected row is usable."""
    if len(selection.samples):
        return
    counts = {status: int(n) for status, n in zip(Status, selection.counts, strict=True) if n}
    reasons = ", ".join(f"{n} {status.name.lower().replace('_', ' ')}" for status, n in counts.items())
    if Status.BAD in counts:
        reasons += f": {split.describe_first_bad(selection)}"
    reason = f"no row of --dataset_name {split.cfg.dataset_name} can be used ({reasons or 'it is empty'})"
    raise bad_setting(f"{reason}; check the data and its columns, or raise --max_seq_length", **flag)


def require_full_step(source: Stored | Stream) -> None:
    """Raise UserError if ranks would get no sequence in every step; warn if steps are never full."""
    shape, split, stride = source.layout.shape, source.layout.cfg.split_name, source.layout.stride
    available = counted(source.num_bins, "sequence")
    if isinstance(source, Stream) and not source.is_one_window:
        return
    if source.num_bins < stride and shape.world_size > 1:
        raise bad_setting(
            f"on {shape.world_size} ranks a micro-batch needs {stride} sequences, but --split_name "
            f"{split} has {available}; use a smaller --batch_size, fewer ranks or more data",
            batch_size=shape.batch_size,
        )
    if source.num_bins < (wanted := shape.micro_batches_per_step * stride):
        logger.warning("the data has only %s; a step should have %d", available, wanted)


def evaluation_prompts(split: Split, selection: Selection) -> list[tuple[str, str]]:
    """Return the prompts and answers of a selection's first NUM_PROMPTS rows; [] for plain text."""
    if not split.source.columns.chat:
        return []
    samples = map(split.source.to_sample, selected_rows(split, selection, NUM_PROMPTS))
    return [split.encoder.prompt_and_answer(sample) for sample in samples]


def selected_rows(split: Split, selection: Selection, most: int | None = None) -> list[Row]:
    """Return a selection's usable rows as they are stored, the first `most` of them."""
    rows, numbers = split.source.rows, np.unique(selection.samples.row)[:most].tolist()
    stored = rows if isinstance(rows, Dataset) else list(islice(rows, numbers[-1] + 1))
    return [stored[number] for number in numbers]
