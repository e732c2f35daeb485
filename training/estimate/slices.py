"""The slice of a model that one rank holds under tensor and pipeline parallelism.

A rank is predicted as one of a smaller model: of a pipeline stage's layers, with 1/tp of the heads, of the
feed-forward size and of the vocabulary. The ranks that hold the same slice share its state as the GPUs of
that model, and context parallelism splits their sequences. This module must not import torch.
"""

from __future__ import annotations

from dataclasses import replace

from fp8_suite.training.estimate.layout import stage_layers
from fp8_suite.training.estimate.setup import TrainingSetup


def rank_setups(setup: TrainingSetup) -> list[TrainingSetup]:
    """Return the setups of the ranks that may need most memory or time: first, second and last stage."""
    if setup.layout.slices == 1 or setup.model_layers:  # nothing to split, or split already
        return [setup]
    stages = sorted({0, min(1, setup.layout.pp - 1), setup.layout.pp - 1})
    return [_rank_setup(setup, stage) for stage in stages]


def _rank_setup(setup: TrainingSetup, stage: int) -> TrainingSetup:
    model, shape, layout = setup.model, setup.model.shape, setup.layout
    part = replace(shape.part(layout.tp), num_layers=stage_layers(shape.num_layers, layout.pp, stage))
    if stage not in (0, layout.pp - 1):
        part = replace(part, vocab_size=0)
    # A stage has one of embedding and LM head, as if they were tied.
    size = replace(model, shape=part, tied=model.tied or layout.pp > 1)
    layers = int(part.num_layers * model.block_weights / layout.tp)
    return replace(
        setup,
        model=replace(size, parameters=size.root_weights + layers),
        gpus=setup.gpus // layout.slices,
        gpus_per_node=max(1, setup.gpus_per_node // layout.tp),
        stage=stage,
        model_layers=shape.num_layers,
    )
