"""Packing and collation: properties over random lengths, and hand-computed examples."""

from itertools import chain, combinations

import numpy as np
import pytest
import torch
from fp8_suite.data.collate import IGNORE, Sample, build_batch
from fp8_suite.data.context import Context
from fp8_suite.data.packing import LOOK_AHEAD, best_fit_subset, pack, permutation, split_lengths


def sample(*ids, loss=None, row=0):
    return Sample(np.array(ids, dtype=np.int32), np.array(loss or [True] * len(ids)), row)


@pytest.mark.parametrize("seed", range(10))
def test_bins_have_every_sample_once_within_capacity_without_starvation(seed):
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(1, 200))
    lengths = rng.integers(1, capacity + 1, rng.integers(0, 400))
    order = permutation(len(lengths), seed)
    bins = list(pack(lengths, order, capacity))
    assert sorted(chain.from_iterable(bins)) == list(range(len(lengths)))
    assert all(0 < lengths[members].sum() <= capacity for members in bins)
    number = {sample: i for i, members in enumerate(bins) for sample in members}
    assert all(number[sample] <= place for place, sample in enumerate(order.tolist()))


def test_order_depends_only_on_seed_and_epoch():
    assert permutation(50, 1, 2).tolist() == permutation(50, 1, 2).tolist()
    assert len({tuple(permutation(50, seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4


def test_best_fit_subset_is_the_fullest_and_prefers_early_samples():
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths = rng.integers(1, 12, rng.integers(0, 8)).tolist()
        capacity = int(rng.integers(0, 40))
        fitting = [
            c
            for n in range(len(lengths) + 1)
            for c in combinations(range(len(lengths)), n)
            if sum(lengths[i] for i in c) <= capacity
        ]
        best = max(sum(lengths[i] for i in c) for c in fitting)
        fullest = [c for c in fitting if sum(lengths[i] for i in c) == best]
        assert tuple(best_fit_subset(lengths, capacity)) == min(fullest, key=lambda c: c[::-1])


def test_fill_matches_hand_computed_bins():
    lengths = np.array([5, 3, 2, 5, 4, 1])
    bins = list(pack(lengths, np.arange(6), 8))
    assert bins == [[0, 1], [2, 5, 3], [4]]  # 5 + 3; 2, then 1 and 5 rather than 4; 4
    # The whole window fills the bin exactly: it is chosen as best subset, in reverse order.
    assert list(pack(np.array([2, 3, 3]), np.arange(3), 8)) == [[0, 2, 1]]
    assert list(pack(np.array([2, 3, 3]), np.arange(3), 9)) == [[0, 1, 2]]
    assert list(pack(lengths[:0], np.arange(0), 8)) == []


def test_realistic_lengths_fill_sequences():
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(5.4, 0.4, 7000).astype(np.int64).clip(80, 1024)  # similar to GSM8K
    assert lengths.sum() / (len(list(pack(lengths, permutation(7000, 42, 0), 1024))) * 1024) > 0.99
    short, capacity = rng.integers(20, 60, 4000), 50 * LOOK_AHEAD  # more than the look-ahead can fill
    full = [short[members].sum() / capacity for members in pack(short, np.arange(4000), capacity)]
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
        assert limit == 2 or total == 1 or length[mine].min() > 1  # a single token has no label


def test_packed_batch_matches_hand_computed_tensors():
    rows = [
        [sample(11, 12, 13, loss=[False, True, True], row=7), sample(21, 22, row=9)],
        [sample(31, 32, 33, row=4)],
    ]
    batch, x = build_batch(rows, 8, pad_id=0, max_seqlen=8), IGNORE
    assert batch.inputs["input_ids"].tolist() == [[11, 12, 13, 21, 22, 0, 0, 0], [31, 32, 33, 0, 0, 0, 0, 0]]
    assert batch.inputs["labels"].tolist() == [[12, 13, x, 22, x, x, x, x], [32, 33, x, x, x, x, x, x]]
    assert batch.inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 0, 1, 2, 3, 4]]
    assert batch.inputs["cu_seqlens"].tolist() == [0, 3, 5, 8, 11, 16]
    assert batch.inputs["cu_seqlens"].dtype == torch.int32 and batch.inputs["max_seqlen"] == 8
    assert all(batch.inputs[k].dtype == torch.int64 for k in ("input_ids", "labels", "position_ids"))
    assert (batch.label_tokens, batch.real_tokens, batch.padded_tokens) == (5, 8, 16)
    assert batch.sum_squared_lengths == 9 + 4 + 9 and batch.sample_ids == [7, 9, 4]
    moved = batch.to("meta")
    assert all(v.device.type == "meta" for v in moved.inputs.values() if isinstance(v, torch.Tensor))
    assert (moved.inputs["max_seqlen"], moved.label_tokens, moved.sample_ids) == (8, 5, [7, 9, 4])


def test_padded_batch_matches_hand_computed_tensors():
    rows, x = [[sample(11, 12, 13, loss=[False, False, True], row=1)], [sample(0, 0, row=2)]], IGNORE
    batch = build_batch(rows, 4, pad_id=0)
    assert batch.inputs["input_ids"].tolist() == [[11, 12, 13, 0], [0, 0, 0, 0]]
    # Id 0 is the padding id and also a real token of the second sample, where it keeps its loss.
    assert batch.inputs["labels"].tolist() == [[x, 13, x, x], [0, x, x, x]]
    assert batch.inputs["position_ids"].tolist() == [[0, 1, 2, 3]] * 2
    assert set(batch.inputs) == {"input_ids", "labels", "position_ids"}
    assert (batch.label_tokens, batch.real_tokens, batch.padded_tokens) == (2, 5, 8)


@pytest.mark.parametrize("max_seqlen", [None, 64])
def test_rank_without_samples_gets_one_row_of_padding(max_seqlen):
    batch = build_batch([], 16, pad_id=5, max_seqlen=max_seqlen)
    assert batch.inputs["input_ids"].tolist() == [[5] * 16]
    assert batch.inputs["labels"].tolist() == [[IGNORE] * 16]
    assert (batch.label_tokens, batch.real_tokens, batch.sample_ids) == (0, 0, [])
    if max_seqlen:
        assert batch.inputs["cu_seqlens"].tolist() == [0, 16] and batch.inputs["max_seqlen"] == 64


def test_ranks_of_a_sequence_hold_its_first_and_last_chunks():
    """The example in TE's `attn_forward_func_with_cp`: sequences of 8 and 4 tokens on 2 ranks."""
    assert [Context(2, rank).places([0, 8, 12]).tolist() for rank in (0, 1)] == [
        [0, 1, 6, 7, 8, 11],
        [2, 3, 4, 5, 9, 10],
    ]
    rows = [[sample(1, 2, 3, 4, 5), sample(6, 7)]]
    first, second = (build_batch(rows, 16, pad_id=0, max_seqlen=16, context=Context(2, r)) for r in (0, 1))
    assert first.inputs["input_ids"].tolist() == [[1, 2, 0, 0, 6, 0, 0, 0]]
    assert second.inputs["input_ids"].tolist() == [[3, 4, 5, 0, 7, 0, 0, 0]]
    assert first.inputs["labels"].tolist() == [[2, 3, *[IGNORE] * 2, 7, *[IGNORE] * 3]]
    assert second.inputs["labels"].tolist() == [[4, 5, *[IGNORE] * 6]]
    assert first.inputs["cu_seqlens"].tolist() == second.inputs["cu_seqlens"].tolist() == [0, 8, 12, 16]
    assert second.inputs["position_ids"].tolist() == [[2, 3, 4, 5, 1, 2, 1, 2]]
    assert (first.real_tokens, second.real_tokens, first.label_tokens, second.label_tokens) == (3, 4, 3, 2)
    assert first.sum_squared_lengths + second.sum_squared_lengths == 5**2 + 2**2
