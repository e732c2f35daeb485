"""A run's whole state, out and in again: weights, buffers, optimizer, random state, loader, FP8 scaling."""

import json
import random
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from training.checkpoint.progress import Progress
from training.checkpoint.state import restore_run, save_run
from training.checkpoint.store import Checkpoints
from training.config import config_from_dict
from training.parallel.strategies import Strategy
from training.precision.recipes import Precision
from training.precision.scaling_state import scaling_state


class Place:
    """A loader that is nothing but its place in the data."""

    def __init__(self, row: int):
        self.row = row

    def state_dict(self) -> dict:
        return {"row": self.row}

    def load_state_dict(self, state: dict) -> None:
        self.row = state["row"]


def parts(value: float, count: int):
    """Model, optimizer and loader; Adagrad, given a count by group, counts its steps where FusedAdam does."""
    model = nn.BatchNorm1d(3)
    for tensor in (*model.parameters(), model.running_mean):
        nn.init.constant_(tensor, value)
    model.register_buffer("scratch", torch.full((2,), value), persistent=False)
    tensors = SimpleNamespace(scale=torch.full((3,), value), amax_history=torch.full((4, 3), value))
    model.fp8_meta = {"scaling_fwd": tensors}
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=value)
    optimizer.param_groups[0]["step"] = count
    return {"model": model, "optimizer": optimizer, "loader": Place(count)}


def draw():
    """From every generator; from two of them what they kept for later and a new number."""
    gauss = random.gauss(0, 1), np.random.standard_normal(2).tolist()
    return torch.rand(2).tolist(), random.random(), gauss


def test_everything_a_run_was_comes_back(tmp_path):
    checkpoints, saved = Checkpoints(tmp_path, keep_last=1), parts(5.0, 7)
    progress = Progress(step=3, real_tokens=11, skipped_steps=1, best_eval_loss=0.5)
    alone = Strategy(torch.device("cpu"))
    cfg, resolved = config_from_dict({}), Precision("mxfp8", "delayed", "too old")
    numbers = {"progress": progress, "total_steps": 9, "eval_loss": 0.5, "evaluation": "samples"}
    scaling = scaling_state(saved["model"])
    random.seed(0), np.random.seed(0)
    random.gauss(0, 1), np.random.standard_normal()  # both now keep a second number for later
    save_run(checkpoints, cfg, resolved, **saved, **numbers, strategy=alone, scaling=scaling)
    expected = draw()
    assert json.loads((tmp_path / "index.json").read_text())["best_eval_loss"] == 0.5

    path, fresh = checkpoints.latest(), parts(1.0, 0)
    meta = checkpoints.read_meta(path)
    assert (meta["config"], meta["recipe"]) == (cfg.to_dict(), "delayed")
    returned, scaling = restore_run(checkpoints, path, meta, cfg, **fresh, strategy=alone)
    assert returned == progress and fresh["loader"].row == 7
    assert draw() == expected
    assert fresh["optimizer"].param_groups[0]["step"] == 7
    model, accumulated = fresh["model"], fresh["optimizer"].state
    for tensor in (model.weight, model.bias, model.running_mean, accumulated[model.weight]["sum"]):
        assert tensor.eq(5).all()
    assert model.scratch.eq(1).all()  # what follows from the configuration is not saved
    assert scaling.keys() == scaling_state(model).keys() and all(t.eq(5).all() for t in scaling.values())
