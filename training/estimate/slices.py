"""The slice of a model that one rank holds under tensor and pipeline parallelism.

A rank is predicted as one of a smaller model: of a pipeline stage's layers, with 1/tp of the heads, of the
feed-forward size and of the vocabulary. The ranks that hold the same slice share its state as the GPUs of
that model, and context parallelism splits their sequences. This module must not import torch.
"""

from __future__ import annotations

from dataclasses import replace

from fp8_suite.training.estimate.layout import Layout, stage_layers
from fp8_suite.training.estimate.setup import ModelSize, TrainingSetup


def rank_setups(setup: TrainingSetup) -> list[TrainingSetup]:
    """Return the setups of the ranks that may need most memory or time: first, second and last stage."""
    if setup.layout.slices == 1 or setup.model_layers:  # nothing to split, or split already
        return [setup]
    stages = sorted({0, min(1, setup.layout.pp - 1), setup.layout.pp - 1})
    return [_rank_setup(setup, stage) for stage in stages]


def _rank_setup(setup: TrainingSetup, stage: int) -> TrainingSetup:
    layout = setup.layout
    return replace(
        setup,
        model=_slice(setup.model, layout, stage),
        gpus=setup.gpus // layout.slices,
        gpus_per_node=max(1, setup.gpus_per_node // layout.tp),
        stage=stage,
        model_layers=setup.model.shape.num_layers,
    )


def _slice(model: ModelSize, layout: Layout, stage: int) -> ModelSize:
    shape, tp, inner = model.shape, layout.tp, 0 < stage < layout.pp - 1
    layers = stage_layers(shape.num_layers, layout.pp, stage)
    part = replace(
        shape,
        num_layers=layers,
        num_heads=shape.num_heads // tp,
        num_kv_heads=shape.num_kv_heads // tp,
        ffn_hidden_size=shape.ffn_hidden_size // tp,
        vocab_size=0 if inner else -(-shape.vocab_size // tp),
    )
    tied = model.tied or layout.pp > 1  # one of embedding and head
    size = replace(model, shape=part, tied=tied)
    return replace(size, parameters=size.root_weights + int(layers * model.block_weights / tp))
