"""Data: from a data set's name to resumable, rank-sharded micro-batches. See `build_loaders`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from data import sources
from data.cache import check_cache
from data.chat import Encoder, Status, load_tokenizer
from data.collate import Batch
from data.demo import ALIASES
from data.loader import Layout, Loader, Stored, Stream
from data.packing import Bins, shuffled
from data.samples import DataReport, Selection, Split
from data.settings import DataConfig
from data.sources import PEEK, TOOLS, Source

__all__ = ["DATASETS", "Batch", "DataReport", "Loader", "Loaders", "build_loaders", "load_tokenizer"]

# A data set not named here is read by sources.detect.
DATASETS: dict[str, Callable[[DataConfig, str], Source]] = {
    "demo": sources.demo,
}
NUM_PROMPTS = 256  # held-out prompts kept for sample answers, at most
HELD_OUT_KEY = 2**32 - 1  # tells the held-out part's shuffling from the epochs'

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Shape of this rank's batches, and which share of the data the rank reads."""

    batch_size: int  # sequences per micro-batch and rank
    eval_batch_size: int
    pad_multiple: int = 1  # every row's token count is a multiple of it, as FP8 recipes require
    micro_batches_per_step: int = 1  # prefetched by the workers
    rank: int = 0
    world_size: int = 1
    pin_memory: bool = False


@dataclass(frozen=True)
class Loaders:
    """What training reads: `eval` is None without evaluation data, `eval_prompts` is [] unless it is chat."""

    train: Loader
    eval: Loader | None
    report: DataReport
    eval_report: DataReport | None
    # (rendered prompt, reference answer); the prompt holds its special tokens, so tokenise it as it is.
    eval_prompts: list[tuple[str, str]]


def build_loaders(
    cfg: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    shape: BatchShape,
    *,
    seed: int,
    vocab_size: int,
    max_positions: int | None,
) -> Loaders:
    """Open, tokenise (or read from the cache), hold out and pack alike on all ranks; each reads its share.

    `vocab_size` and `max_positions` are the model's. ValueError for unusable settings or data.
    """
    check(cfg, max_positions)
    known = (i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None)
    pad = next((i for i in known if i < vocab_size), 0)  # an added token may be past the model's embedding
    layout = Layout(
        cfg.max_seq_length,
        shape.pad_multiple,
        cfg.packing,
        shape.batch_size,
        pad,
        shape.rank,
        shape.world_size,
    )
    split = eval_split = open_split(cfg, cfg.split_name, tokenizer, vocab_size)
    if cfg.eval_split is not None and cfg.eval_samples:  # before minutes of tokenisation: it may be misnamed
        eval_split = open_split(cfg, cfg.eval_split, tokenizer, vocab_size)
    # Rows of the training split that evaluation takes.
    held_out = cfg.eval_samples if cfg.eval_split is None else 0
    source: Stored | Stream
    if cfg.streaming:
        source = Stream(split, layout, seed=seed, held_out=held_out)
        train = source.first
        held = split.sample(held_out) if held_out else None
    else:
        train, held = divide(split, held_out, seed)
        source = Stored(train.samples, layout, seed=seed)
    bins = source.bins
    require_usable(split, train, f"--split_name {cfg.split_name}")
    whole = not cfg.streaming or source.is_one_window
    if shape.world_size > 1 and whole and len(bins) < layout.stride:
        raise ValueError(
            f"--batch_size {shape.batch_size} on {shape.world_size} ranks: a micro-batch needs {layout.stride} "
            f"sequences, but --split_name {cfg.split_name} has {len(bins)}; use a smaller --batch_size, "
            "fewer ranks or more data"
        )
    if eval_split is not split:
        held = eval_split.sample(cfg.eval_samples)
    identity = {
        "samples": train.fingerprint,
        "max_seq_length": cfg.max_seq_length,
        "packing": cfg.packing,
        "seed": seed,
        "streaming": cfg.streaming,
    }
    workers = {"num_workers": cfg.num_workers, "pin_memory": shape.pin_memory}
    loaders = Loaders(
        train=Loader(source, identity=identity, per_step=shape.micro_batches_per_step, **workers),
        eval=None,
        report=replace(report(split, train, layout, bins, streaming=cfg.streaming), **split.tokenised),
        eval_report=None,
        eval_prompts=[],
    )
    if held is None:
        return loaders
    layout = replace(layout, batch_size=shape.eval_batch_size)
    return _with_evaluation(loaders, cfg, eval_split, held, layout, workers)


def _with_evaluation(
    loaders: Loaders,
    cfg: DataConfig,
    split: Split,
    held: Selection,
    layout: Layout,
    workers: dict[str, Any],
) -> Loaders:
    """`loaders` with the rows `held` of `split`; ValueError if none of one that was asked for is usable."""
    if cfg.eval_split:
        require_usable(split, held, f"--eval_split {cfg.eval_split}")
    elif not len(held.samples):
        logger.warning(
            "none of the %d held-out rows can be used: this run has no evaluation", held.counts.sum()
        )
        return loaders
    source = Stored(held.samples, layout, seed=None)
    return replace(
        loaders,
        eval=Loader(source, identity={"samples": held.fingerprint}, restart=True, **workers),
        eval_report=report(split, held, layout, source.bins),
        eval_prompts=prompts(split, held),
    )


def check(cfg: DataConfig, max_positions: int | None) -> None:
    check_cache(cfg)
    cfg.check_length(max_positions)
    if cfg.eval_split is None:
        return
    aliases = ALIASES if cfg.dataset_name == "demo" else {}
    if aliases.get(cfg.eval_split, cfg.eval_split) == aliases.get(cfg.split_name, cfg.split_name):
        raise ValueError(
            f"--eval_split {cfg.eval_split}: is the training split; leave it out to hold out a part of that"
        )
    if cfg.eval_split.startswith("train") and cfg.split_name.startswith("train"):
        logger.warning(
            "--eval_split %s: may hold rows of --split_name %s, as OpenMathInstruct-2's train holds train_1M",
            cfg.eval_split,
            cfg.split_name,
        )


def open_split(cfg: DataConfig, name: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Split:
    source = DATASETS.get(cfg.dataset_name, sources.detect)(cfg, name)
    if isinstance(source.rows, Dataset) and not len(source.rows):
        raise ValueError(f"--dataset_name {cfg.dataset_name}: split {name} has no rows; take another split")
    encoder = Encoder(tokenizer, source.to_sample, chat=source.chat, system=source.system)
    if source.chat and name == cfg.split_name and encoder.turn_end is None:
        logger.warning(
            "--tokenizer_name %s: its chat template ends an answer with no special token, so nothing in "
            "training shows the model where to stop",
            tokenizer.name_or_path,
        )
    if source.tools and name == cfg.split_name:
        if not encoder.writes_tools:
            logger.warning(
                "--tokenizer_name %s: its chat template has no place for tools: the data's are left out",
                tokenizer.name_or_path,
            )
        elif has_unread_tools(cfg, source):
            logger.warning(
                "--dataset_name %s: column %s holds what are no lists of functions; they are left out",
                cfg.dataset_name,
                TOOLS,
            )
    return Split(cfg, source, encoder, vocab_size)


def has_unread_tools(cfg: DataConfig, source: Source) -> bool:
    """Whether any of the first rows holds tools that are no list of functions."""
    with sources.reading(cfg):
        first = list(islice(source.rows, PEEK))
    return any(source.to_sample(row).get("tools", []) is None for row in first)


def divide(split: Split, eval_samples: int, seed: int) -> tuple[Selection, Selection | None]:
    """Training rows and at most `eval_samples` held out of them: never over 10 %, chosen by seed."""
    cfg, rows = split.cfg, split.source.rows
    held_out = min(eval_samples, len(rows) // 10)
    if eval_samples and not held_out:
        logger.warning("%d rows are too few to hold some out: this run has no evaluation", len(rows))
    if cfg.num_of_samples is not None and cfg.num_of_samples + held_out < len(rows):
        rows = rows.select(range(cfg.num_of_samples + held_out))
    tokens = split.tokenise(rows)
    held = np.zeros(len(rows), dtype=bool)
    held[shuffled(len(rows), seed, HELD_OUT_KEY)[:held_out]] = True
    numbers = np.arange(len(rows))
    train = split.select(tokens, ~held, numbers)
    return train, split.select(tokens, held, numbers) if held_out else None


def require_usable(split: Split, selection: Selection, flag: str) -> None:
    if len(selection.samples):
        return
    cfg = split.cfg
    counts = {status.name.lower(): int(n) for status, n in zip(Status, selection.counts, strict=True) if n}
    reasons = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in counts.items()) or "it is empty"
    reasons += f": {split.first_bad(selection)}" if "bad" in counts else ""
    way = f"check the data, its columns, and --max_seq_length {cfg.max_seq_length}"
    if "overlong" in counts:
        way = f"raise --max_seq_length {cfg.max_seq_length}, add --overlong truncate, or check the data"
    raise ValueError(f"{flag} of --dataset_name {cfg.dataset_name}: no row can be used ({reasons}); {way}")


def report(
    split: Split, selection: Selection, layout: Layout, bins: Bins, *, streaming: bool = False
) -> DataReport:
    counts, lengths = selection.counts, selection.samples.length
    tokens = int(lengths.sum())
    return DataReport(
        rows=int(counts.sum()),
        used=int(counts[: Status.TRUNCATED + 1].sum()),
        empty=int(counts[Status.EMPTY]),
        overlong_dropped=int(counts[Status.OVERLONG]),
        overlong_truncated=int(counts[Status.TRUNCATED]),
        without_label=int(counts[Status.WITHOUT_LABEL]),
        bad_rows=int(counts[Status.BAD]),
        first_bad_row=split.first_bad(selection),
        tokens=tokens,
        label_tokens=selection.label_tokens,
        sequences=len(bins),
        packing_efficiency=tokens / max(layout.padded_tokens(lengths, bins), 1),
        columns=split.source.columns,
        fingerprint=selection.fingerprint,
        streaming=streaming,
    )


def prompts(split: Split, selection: Selection) -> list[tuple[str, str]]:
    """The first NUM_PROMPTS (rendered prompt, reference answer) of a selection; [] for plain text."""
    if not split.source.chat:
        return []
    rows, wanted = split.source.rows, np.unique(selection.samples.row)[:NUM_PROMPTS].tolist()
    if isinstance(rows, Dataset):
        found = list(rows.select(wanted))
    else:
        head = list(islice(rows, wanted[-1] + 1))
        found = [head[i] for i in wanted]
    samples = (split.source.to_sample(row) for row in found)
    return [split.encoder.prompt_and_answer(sample) for sample in samples]
