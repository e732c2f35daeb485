"""A checkpoint restores a run's whole state: weights, buffers, optimizer, RNG, loader, FP8 scaling."""

import json
import random
from types import SimpleNamespace

import numpy as np
import torch
from fp8_suite.training.checkpoint.progress import Progress
from fp8_suite.training.checkpoint.resume import ResumePoint
from fp8_suite.training.checkpoint.state import RunState, restore_run, saved_state
from fp8_suite.training.checkpoint.store import Checkpoints
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.optim.optimizer import (
    build_optimizer,
    choose_optimizer,
    optimizer_state,
    optimizer_steps,
    set_optimizer_steps,
)
from fp8_suite.training.parallel.strategies import Strategy
from fp8_suite.training.precision.recipes import Precision
from fp8_suite.training.precision.scaling import scaling_state
from torch import nn


def parts(value: float, count: int):
    """Model, optimizer after `count` steps, and loader; `value` fills all tensors."""
    model = nn.BatchNorm1d(3)
    for tensor in (*model.parameters(), model.running_mean):
        nn.init.constant_(tensor, value)
    model.register_buffer("scratch", torch.full((2,), value), persistent=False)
    tensors = SimpleNamespace(scale=torch.full((3,), value), amax_history=torch.full((4, 3), value))
    model.fp8_meta = {"scaling_fwd": tensors}
    cfg = config_from_dict({})
    optimizer = build_optimizer(model, cfg.optim, choose_optimizer(cfg, "single", on_gpu=True))
    for tensor in optimizer_state(optimizer, model).values():
        nn.init.constant_(tensor, value)
    set_optimizer_steps(optimizer, count)
    return {
        "model": model,
        "optimizer": optimizer,
        "loader": SimpleNamespace(state_dict=lambda: {"row": count}),
    }


def draw():
    """Draw from every generator, including the numbers that two of them keep for later."""
    gauss = random.gauss(0, 1), np.random.standard_normal(2).tolist()
    return torch.rand(2).tolist(), random.random(), gauss


def test_a_checkpoint_restores_everything(tmp_path):
    checkpoints, saved = Checkpoints(tmp_path, keep_last=1), parts(5.0, 7)
    progress = Progress(step=3, real_tokens=11, skipped_steps=1, best_eval_loss=0.5)
    cfg, resolved = config_from_dict({}), Precision("mxfp8", "delayed", "too old")

    def state(parts, progress):
        strategy = Strategy("single", torch.device("cpu"), cfg)
        return RunState(
            cfg, resolved, strategy=strategy, progress=progress, total_steps=9, evaluation="samples", **parts
        )

    random.seed(0), np.random.seed(0)
    random.gauss(0, 1), np.random.standard_normal()  # both now keep a second number for later
    tensors, meta = saved_state(state(saved, progress), scaling_state(saved["model"]))
    checkpoints.save(3, tensors, meta, eval_loss=0.5)
    expected = draw()
    assert json.loads((tmp_path / "index.json").read_text())["best_eval_loss"] == 0.5

    path, fresh, restored = checkpoints.latest(), parts(1.0, 0), Progress()
    meta = checkpoints.read_meta(path)
    assert (meta["config"], meta["recipe"]) == (cfg.to_dict(), "delayed")
    point = ResumePoint(path, meta, same_run=True, rollback=False)
    scaling = restore_run(checkpoints, point, state(fresh, restored))
    assert restored == progress and meta["loader"] == {"row": 7}
    assert draw() == expected
    model, optimizer = fresh["model"], fresh["optimizer"]
    assert optimizer_steps(optimizer) == 7
    for tensor in (*model.parameters(), model.running_mean, *optimizer_state(optimizer, model).values()):
        assert tensor.eq(5).all()
    assert model.scratch.eq(1).all()  # non-persistent buffers are not saved
    assert scaling.keys() == scaling_state(model).keys() and all(t.eq(5).all() for t in scaling.values())
