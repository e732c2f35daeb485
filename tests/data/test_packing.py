"""Bins, and the tensors made of them, over random lengths and by hand."""

from __future__ import annotations

from itertools import chain, combinations, pairwise

import numpy as np
import pytest
import torch

import data.packing
from data.collate import IGNORE, Sample, pack_rows, pad_rows
from data.packing import LOOK_AHEAD, Bins, fill, fullest, shuffled, split_lengths


def sample(*ids, loss=None, row=0):
    return Sample(np.array(ids, dtype=np.int32), np.array(loss or [True] * len(ids)), row)


def random_rows(rng, width):
    """Rows of samples that fit `width`, with random loss, numbered through."""
    rows, number = [], 0
    for _ in range(rng.integers(1, 5)):
        row, free = [], width
        while free and rng.random() < 0.8:
            n = int(rng.integers(1, free + 1))
            row.append(Sample(rng.integers(10, 99, n).astype(np.int32), rng.random(n) < 0.5, number))
            free, number = free - n, number + 1
        rows.append(row)
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_bins_hold_every_sample_once_and_never_too_much(seed):
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(1, 200))
    lengths = rng.integers(1, capacity + 1, rng.integers(0, 400))
    order = shuffled(len(lengths), seed)
    members = list(fill(lengths, order, capacity))
    assert sorted(chain.from_iterable(members)) == list(range(len(lengths)))
    assert all(0 < lengths[m].sum() <= capacity for m in members)
    # The sample that has waited longest comes first, so none waits longer than the look-ahead of bins.
    waited = {s: i for i, m in enumerate(members) for s in m}
    assert all(waited[s] <= place for place, s in enumerate(order.tolist()))


def test_the_order_depends_on_seed_and_epoch_alone():
    assert shuffled(50, 1, 2).tolist() == shuffled(50, 1, 2).tolist()
    assert len({tuple(shuffled(50, seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4


def test_fullest_is_the_best_subset():
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths = rng.integers(1, 20, rng.integers(0, 8)).tolist()
        capacity = int(rng.integers(0, 40))
        chosen = fullest(lengths, capacity)
        subsets = [c for n in range(len(lengths) + 1) for c in combinations(lengths, n)]
        assert chosen == sorted(set(chosen))
        assert sum(lengths[i] for i in chosen) == max(sum(c) for c in subsets if sum(c) <= capacity)


def subset_sums(lengths):
    sums = {0}
    for length in lengths:
        sums |= {total + length for total in sums}
    return sums


def slow_fullest(lengths, capacity):
    """As `fullest`, from sets of sums: the choice whose last index is the lowest, then the one before it."""
    total = max(t for t in subset_sums(lengths) if t <= capacity)
    chosen = []
    while total:
        last = next(i for i in range(len(lengths)) if total in subset_sums(lengths[: i + 1]))
        chosen.append(last)
        total -= lengths[last]
        lengths = lengths[:last]
    return chosen[::-1]


def slow_fill(lengths, order, capacity):
    """As `fill`, from one list of all samples."""
    waiting, bins = order.tolist(), []
    while waiting:
        bins.append([waiting.pop(0)])
        while waiting and sum(lengths[bins[-1] + waiting[:LOOK_AHEAD]]) < capacity:
            bins[-1].append(waiting.pop(0))
        free = capacity - lengths[bins[-1]].sum()
        for i in reversed(slow_fullest(lengths[waiting[:LOOK_AHEAD]].tolist(), free)):
            bins[-1].append(waiting.pop(i))
    return bins


@pytest.mark.parametrize("seed", range(8))
def test_bins_are_those_of_the_plain_way(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(data.packing, "CHUNK", 50)  # several in the samples
    capacity = int(rng.integers(1, 120))
    lengths = rng.integers(1, min(capacity, int(rng.integers(2, 120))) + 1, 180)
    order = shuffled(len(lengths), seed)
    assert list(fill(lengths, order, capacity)) == slow_fill(lengths, order, capacity)


def test_filling_by_hand():
    lengths = np.array([5, 3, 2, 5, 4, 1])
    bins = list(fill(lengths, np.arange(6), 8))
    assert bins == [[0, 1], [2, 5, 3], [4]]  # 5 + 3; 2, then 1 and 5 rather than 4; 4
    # All that is in sight fits, but leaves no room: chosen as the fullest, from the back.
    assert list(fill(np.array([2, 3, 3]), np.arange(3), 8)) == [[0, 2, 1]]
    assert list(fill(np.array([2, 3, 3]), np.arange(3), 9)) == [[0, 1, 2]]
    collected = Bins.collect(bins)
    assert [collected.members(i) for i in range(len(collected))] == bins
    assert collected.order.dtype == collected.offsets.dtype == np.int64
    assert list(fill(lengths[:0], np.arange(0), 8)) == [] and len(Bins.collect([])) == 0


def test_gsm8k_like_lengths_fill_sequences():
    lengths = np.random.default_rng(0).lognormal(5.4, 0.4, 7000).astype(np.int64).clip(80, 1024)
    bins = list(fill(lengths, shuffled(len(lengths), 42, 0), 1024))
    assert lengths.sum() / (len(bins) * 1024) > 0.99


def test_short_samples_fill_a_long_sequence():
    lengths = np.random.default_rng(0).integers(20, 60, 4000)
    capacity = 50 * LOOK_AHEAD  # more than the look-ahead can fill
    full = [lengths[members].sum() / capacity for members in fill(lengths, np.arange(4000), capacity)]
    assert min(full[:-1]) > 0.99


@pytest.mark.parametrize("limit", [2, 3, 7, 100])
def test_pieces_of_a_document_are_consecutive_and_complete(limit):
    lengths = np.array([1, 2, 3, 4, 7, 8, 9, 15, 22, 99, 100, 101])
    document, start, length = split_lengths(lengths, limit)
    assert length.max() <= limit
    for i, total in enumerate(lengths):
        mine = np.flatnonzero(document == i)
        assert start[mine].tolist() == [0, *np.cumsum(length[mine])[:-1]]
        assert length[mine].sum() == total
        if limit > 2 and total > 1:
            assert length[mine].min() > 1  # a token alone has nothing to be predicted from


def test_packing_by_hand():
    rows = [
        [sample(11, 12, 13, loss=[False, True, True], row=7), sample(21, 22, row=9)],
        [sample(31, 32, 33, row=4)],
    ]
    batch = pack_rows(rows, 8, pad_id=0, max_seqlen=8)
    x = IGNORE
    assert batch.inputs["input_ids"].tolist() == [[11, 12, 13, 21, 22, 0, 0, 0], [31, 32, 33, 0, 0, 0, 0, 0]]
    assert batch.inputs["labels"].tolist() == [[12, 13, x, 22, x, x, x, x], [32, 33, x, x, x, x, x, x]]
    assert batch.inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 0, 1, 2, 3, 4]]
    assert batch.inputs["cu_seqlens"].tolist() == [0, 3, 5, 8, 11, 16]
    assert batch.inputs["cu_seqlens"].dtype == torch.int32 and batch.inputs["max_seqlen"] == 8
    assert all(batch.inputs[k].dtype == torch.int64 for k in ("input_ids", "labels", "position_ids"))
    assert (batch.label_tokens, batch.real_tokens, batch.padded_tokens) == (5, 8, 16)
    assert batch.sum_squared_lengths == 9 + 4 + 9
    assert batch.sample_ids == [7, 9, 4]


def test_padding_by_hand():
    batch = pad_rows([sample(11, 12, 13, loss=[False, False, True], row=1), sample(0, 0, row=2)], 4, pad_id=0)
    x = IGNORE
    assert batch.inputs["input_ids"].tolist() == [[11, 12, 13, 0], [0, 0, 0, 0]]
    # Token 0 is the padding's id and a real token of the second sample, where it keeps its loss.
    assert batch.inputs["labels"].tolist() == [[x, 13, x, x], [0, x, x, x]]
    assert batch.inputs["position_ids"].tolist() == [[0, 1, 2, 3]] * 2
    assert set(batch.inputs) == {"input_ids", "labels", "position_ids"}
    assert (batch.label_tokens, batch.real_tokens, batch.padded_tokens) == (2, 5, 8)


@pytest.mark.parametrize("seed", range(10))
def test_packed_rows_keep_their_invariants(seed):
    rng = np.random.default_rng(seed)
    width = int(rng.integers(4, 40))
    rows = random_rows(rng, width)
    batch = pack_rows(rows, width, pad_id=1, max_seqlen=width)
    ids, labels, positions = (batch.inputs[k].flatten() for k in ("input_ids", "labels", "position_ids"))
    cu = batch.inputs["cu_seqlens"].tolist()
    assert cu[0] == 0 and cu[-1] == len(rows) * width and all(a < b for a, b in pairwise(cu))
    assert set(range(0, cu[-1], width)) <= set(cu)  # no sequence crosses from one row into the next
    assert max(b - a for a, b in pairwise(cu)) <= width
    sequences = [slice(a, b) for a, b in pairwise(cu)]
    assert all(positions[s].tolist() == list(range(s.stop - s.start)) for s in sequences)
    samples = iter(s for row in rows for s in row)
    for b, row in enumerate(rows):
        inside = [s for s in sequences if b * width <= s.start < (b + 1) * width]
        assert len(inside) == len(row) + (sum(len(s.ids) for s in row) < width)
        for span in inside[: len(row)]:
            expected = next(samples)
            assert ids[span].tolist() == expected.ids.tolist()
            shifted = [
                t if keep else IGNORE for t, keep in zip(expected.ids[1:], expected.loss[1:], strict=True)
            ]
            assert labels[span].tolist() == [*shifted, IGNORE]
        for span in inside[len(row) :]:
            assert set(labels[span].tolist()) == {IGNORE} and set(ids[span].tolist()) == {1}
    assert batch.label_tokens == int((labels != IGNORE).sum())
    assert batch.real_tokens == sum(len(s.ids) for row in rows for s in row)


def test_a_rank_without_samples_gets_padding():
    packed, padded = pack_rows([], 16, pad_id=5, max_seqlen=64), pad_rows([], 16, pad_id=5)
    for batch in (packed, padded):
        assert batch.inputs["input_ids"].tolist() == [[5] * 16]
        assert batch.inputs["labels"].tolist() == [[IGNORE] * 16]
        assert (batch.label_tokens, batch.real_tokens, batch.sample_ids) == (0, 0, [])
    assert packed.inputs["cu_seqlens"].tolist() == [0, 16] and packed.inputs["max_seqlen"] == 64


def test_a_batch_moves_with_its_counts():
    batch = pack_rows([[sample(1, 2, 3)]], 4, pad_id=0, max_seqlen=4)
    moved = batch.to("meta")
    assert all(v.device.type == "meta" for v in moved.inputs.values() if isinstance(v, torch.Tensor))
    assert (moved.inputs["max_seqlen"], moved.label_tokens, moved.sample_ids) == (4, 2, [0])
    assert batch.inputs["input_ids"].device.type == "cpu"
