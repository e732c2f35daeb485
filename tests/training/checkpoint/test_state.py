"""A checkpoint restores what the losses of whole runs do not show: buffers, random generators, progress."""

import random
from types import SimpleNamespace

import numpy as np
import torch
from fp8_suite.training.checkpoint.progress import Progress
from fp8_suite.training.checkpoint.resume import ResumePoint
from fp8_suite.training.checkpoint.state import RunState, restore_run, saved_state
from fp8_suite.training.checkpoint.store import Checkpoints
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.optim.optimizer import build_optimizer, choose_optimizer
from fp8_suite.training.parallel.strategies import Strategy
from fp8_suite.training.precision.recipes import Precision
from torch import nn


def draw():
    """Draw from every generator, including the numbers that two of them keep for later."""
    gauss = random.gauss(0, 1), np.random.standard_normal(2).tolist()
    return torch.rand(2).tolist(), random.random(), gauss


def test_buffers_random_generators_and_progress_are_restored(tmp_path):
    cfg, checkpoints = config_from_dict({}), Checkpoints(tmp_path, keep_last=1)
    precision = Precision("mxfp8", "delayed", "too old")

    def run(value: float, progress: Progress) -> RunState:
        model, strategy = nn.BatchNorm1d(3), Strategy("single", torch.device("cpu"), cfg)
        nn.init.constant_(model.running_mean, value)
        model.register_buffer("scratch", torch.full((2,), value), persistent=False)
        optimizer = build_optimizer(model, cfg.optim, choose_optimizer(cfg, "single", on_gpu=True))
        parts = {"model": model, "optimizer": optimizer, "loader": SimpleNamespace(state_dict=dict)}
        parts |= {"strategy": strategy, "progress": progress, "total_steps": 9, "evaluation": None}
        return RunState(cfg, precision, **parts)

    progress = Progress(step=3, real_tokens=11, skipped_steps=1, best_eval_loss=0.5)
    random.seed(0), np.random.seed(0)
    random.gauss(0, 1), np.random.standard_normal()  # both now keep a second number for later
    checkpoints.save(3, *saved_state(run(5.0, progress), {}))
    expected = draw()
    path, restored = checkpoints.latest(), run(1.0, Progress())
    meta = checkpoints.read_meta(path)
    assert meta["recipe"] == "delayed", "the recipe in effect"
    restore_run(checkpoints, ResumePoint(path, meta, same_run=True, rollback=False), restored)
    assert restored.progress == progress and draw() == expected
    assert restored.model.running_mean.eq(5).all()
    assert restored.model.scratch.eq(1).all(), "buffers that are not persistent are not saved"
