"""Delayed scaling's state, on modules that keep it as TE does."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fp8_suite.core.errors import UserError
from fp8_suite.data.collate import Sample, build_batch
from fp8_suite.data.context import Context
from fp8_suite.training.precision import scaling

from tests.training.parallel.jobs import same_bits


class Scaled(torch.nn.Module):
    """A module with delayed scaling's state as TE keeps it: outside parameters and buffers."""

    def __init__(self):
        super().__init__()
        self.fp8_meta = {
            direction: SimpleNamespace(scale=torch.full((3,), 8.0), amax_history=torch.full((4, 3), 2.0))
            for direction in ("scaling_fwd", "scaling_bwd")
        }


def sample(length: int, *, first_label: int = 1) -> Sample:
    return Sample(np.arange(1, length + 1), np.arange(length) >= first_label, 0)


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in scaling.scaling_state(model).items()}


def test_scaling_state_is_found_frozen_and_restored():
    model = torch.nn.ModuleDict({"a": Scaled(), "b": torch.nn.Linear(2, 2), "c": Scaled()})
    before = values(model)
    assert len(before) == 8 and "a.scaling_bwd.amax_history" in before

    with scaling.frozen_scaling(model):
        for tensor in scaling.scaling_state(model).values():
            tensor.add_(1)
    assert same_bits(values(model), before)

    wanted = {name: torch.rand_like(tensor) for name, tensor in before.items()}
    scaling.restore_scaling(model, {})
    assert same_bits(values(model), before)
    scaling.restore_scaling(model, wanted)
    assert same_bits(values(model), wanted)
    with pytest.raises(UserError, match=r"--resume: .*FP8 scaling state"):
        scaling.restore_scaling(model, {"a.scaling_fwd.scale": torch.ones(3)})


def test_tensors_that_the_saved_run_did_not_scale_keep_their_calibrated_values():
    model = torch.nn.ModuleDict({"a": Scaled()})
    saved = {name: torch.rand_like(tensor) for name, tensor in values(model).items()}
    saved["a.scaling_fwd.scale"][1] = 1.0
    saved["a.scaling_fwd.amax_history"][:, 1] = 0.0
    saved["a.scaling_bwd.scale"][2] = 1.0  # but an amax is recorded
    scaling.restore_scaling(model, saved)
    saved["a.scaling_fwd.scale"][1] = 8.0
    saved["a.scaling_fwd.amax_history"][:, 1] = 2.0
    assert same_bits(values(model), saved)


def test_scrub_clears_non_finite_amaxes_and_gradient_scaling_changes_backward_only():
    model = Scaled()
    history = model.fp8_meta["scaling_fwd"].amax_history
    history[0] = torch.tensor([torch.nan, torch.inf, 5.0])
    parts = dict.fromkeys(("wrapped", "optimizer", "strategy", "autocast"))
    scaling.DelayedScalingState(model=model, **parts, micro_batches=1, saved={}).scrub()
    assert history.tolist() == [[0.0, 0.0, 5.0], *[[2.0] * 3] * 3]

    model = Scaled()
    scaling.scale_gradients(scaling.scaling_state(model), 1 / 4)
    forward, backward = model.fp8_meta["scaling_fwd"], model.fp8_meta["scaling_bwd"]
    assert forward.scale.eq(8).all() and forward.amax_history.eq(2).all()
    assert backward.scale.eq(32).all() and backward.amax_history.eq(0.5).all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("limit", "shape"), [(8, (1, 8)), (30, (3, 10)), (40, (4, 10))])
def test_calibration_runs_on_the_first_tokens(packed, limit, shape):
    rows = [[sample(4), sample(6)], [sample(9)], [sample(2)], [sample(10)]]
    inputs = build_batch(rows, 10, 0, max_seqlen=10 if packed else None).inputs
    part = scaling.first_tokens(inputs, limit)
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(part[name], inputs[name][: shape[0], : shape[1]])
    if packed:
        starts = {8: [0, 4, 8], 30: [0, 4, 10, 19, 20, 22, 30], 40: [0, 4, 10, 19, 20, 22, 30, 40]}
        assert part["cu_seqlens"].tolist() == starts[limit] and part["max_seqlen"] == 10


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("limit", [6, 8, 12, 30])
def test_calibration_cuts_shared_sequences_alike_on_all_ranks(packed, limit):
    """The parts of two ranks are chunks of the same shorter sequences."""
    rows, width = [[sample(8), sample(24)] if packed else [sample(32)], [sample(29)]], 32
    expected = build_batch(rows, width, 0).inputs
    longest, contexts = width if packed else None, [Context(2, rank) for rank in range(2)]
    batches = [build_batch(rows, width, 0, max_seqlen=longest, context=context) for context in contexts]
    parts = [scaling.beginning(batch.inputs, limit, 2) for batch in batches]
    tokens = 2 * min(limit, 16)
    boundaries = parts[0]["cu_seqlens"].tolist() if packed else [0, tokens]
    assert boundaries[-1] == tokens and boundaries == (
        parts[1]["cu_seqlens"].tolist() if packed else [0, tokens]
    )
    actual = {name: torch.empty(tokens, dtype=torch.int64) for name in scaling.PER_TOKEN}
    for context, part in zip(contexts, parts, strict=True):
        for name, values in actual.items():
            values[torch.from_numpy(context.places(boundaries))] = part[name].flatten()
    for start, end in pairwise(boundaries):
        positions = actual["position_ids"][start:end]
        assert positions[0] == 0 and (positions.diff() > 0).all()
        for name in scaling.PER_TOKEN:
            assert torch.equal(actual[name][start:end], expected[name][0, start + positions])


def test_calibration_needs_labels():
    inputs = build_batch([[sample(6, first_label=4)]], 6, 0, max_seqlen=6).inputs
    assert scaling.first_tokens(inputs, 3) is inputs and scaling.first_tokens(inputs, 5) is not inputs
