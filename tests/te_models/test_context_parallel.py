"""Emulated TE layers in FP32 over ranks that share sequences, against one rank, and samples fed alone."""

from itertools import count, islice
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fp8_suite.data.collate import Batch, Sample
from fp8_suite.data.context import WHOLE, Context
from fp8_suite.data.order import BatchLayout, BatchShape, Bin
from fp8_suite.data.settings import DataConfig
from fp8_suite.te_models.build import build_model
from fp8_suite.te_models.options import BuildOptions, ContextParallel
from fp8_suite.te_models.settings import RECOMPUTE_LEVELS
from fp8_suite.te_models.spec import ModelSpec
from torch import Tensor
from transformers import Qwen3Config

from tests.children import preload, run_ranks

preload(__name__)
CPU, WIDTH = torch.device("cpu"), 48
SIZES = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "initializer_range": 0.3},
}
ROWS = {"packed": [[9, 3, 21], [1, 30, 2, 4], [40]], "one sample a row": [[48], [41]], "padded": [[9], [31]]}


class Samples:
    """Samples of random tokens, most of which have a loss."""

    def __init__(self, rows: list[list[int]]):
        rng, lengths = np.random.default_rng(0), [n for row in rows for n in row]
        draws = ((rng.integers(3, 64, n).astype(np.int32), rng.random(n) < 0.7) for n in lengths)
        self.samples = [Sample(*draw, row) for row, draw in enumerate(draws)]

    def fetch(self, numbers: list[int]) -> list[Sample]:
        return [self.samples[number] for number in numbers]


def batch_of(rows: list[list[int]], context: Context, *, packed: bool) -> Batch:
    """Return a batch of samples of these lengths, as a loader makes it."""
    samples, numbers = Samples(rows), count()
    bins = [Bin(0, samples, list(islice(numbers, len(row)))) for row in rows]
    return layout(context, packed=packed).collate(bins)


def layout(context: Context, *, packed: bool) -> BatchLayout:
    shape = BatchShape(batch_size=3, eval_batch_size=3, pad_multiple=4, context=context)
    return BatchLayout(DataConfig(max_seq_length=WIDTH, packing=packed), shape, pad_id=7)


def model_of(context: ContextParallel | None, *, packed: bool, recompute: str = "none") -> torch.nn.Module:
    options = BuildOptions(
        **{"te_backend": "emulated", "dtype": torch.float32, "device": CPU, "max_positions": 96},
        **{"packed": packed, "recompute": recompute, "context": context},
    )
    return build_model(ModelSpec("test", Qwen3Config(**SIZES), None), options)


def train(model: torch.nn.Module, batch: Batch) -> list[Tensor]:
    """Return the summed loss, the number of correct predictions, and the gradients."""
    loss, correct = model(**batch.inputs)
    loss.backward()
    return [loss.detach(), correct, *(p.grad for p in model.parameters())]


def compare_with_one_rank(rank: int, folder: Path) -> None:
    world = dist.group.WORLD
    part = Context(world.size(), rank)
    context = ContextParallel(part, "all_gather", world, [*range(part.size)], None)
    for name, rows in ROWS.items():
        packed = name != "padded"
        whole = batch_of(rows, WHOLE, packed=packed)
        expected = train(model_of(None, packed=packed), whole)
        samples = Samples(rows)
        bins = [[Bin(0, samples, [number])] for number in range(len(samples.samples))]
        alone = (layout(WHOLE, packed=False).collate(bin) for bin in bins)
        losses = [train(model_of(None, packed=False), batch)[0] for batch in alone]
        torch.testing.assert_close(expected[0], sum(losses), rtol=1e-5, atol=0)
        batch = batch_of(rows, part, packed=packed)
        counts = torch.tensor([batch.label_tokens, batch.real_tokens, batch.sum_squared_lengths])
        dist.all_reduce(counts)
        assert counts.tolist() == [whole.label_tokens, whole.real_tokens, whole.sum_squared_lengths]
        for recompute in RECOMPUTE_LEVELS:  # which exchanges keys again
            results = train(model_of(context, packed=packed, recompute=recompute), batch)
            for result, value in zip(results, expected, strict=True):
                dist.all_reduce(result)
                torch.testing.assert_close(result, value, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(results[0], sum(losses), rtol=1e-5, atol=0)


@pytest.mark.parametrize("ranks", [2, 3])
def test_losses_and_gradients_are_those_of_one_rank(ranks, tmp_path):
    run_ranks(compare_with_one_rank, tmp_path, world_size=ranks)
