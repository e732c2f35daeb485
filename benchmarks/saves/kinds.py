"""Savers to compare: the suite's, synchronous and in the background, and torch's own road."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fp8_suite.training.checkpoint.index import step_name
from fp8_suite.training.checkpoint.manifest import MANIFEST, THREADS
from fp8_suite.training.checkpoint.saver import CheckpointSaver
from fp8_suite.training.checkpoint.state import weights_and_optimizer
from fp8_suite.training.parallel import ranks
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions


class Kind(Protocol):
    """One way to save, while the loop trains."""

    def published_as(self, step: int) -> Path: ...  # exists once the checkpoint is complete
    def save(self, step: int) -> None: ...  # start
    def before_update(self) -> None: ...  # wait until the state may change
    def finish(self) -> None: ...  # wait until it is complete
    def close(self) -> None: ...  # free host memory


class Suite:
    """The saver of the run itself, in the background if `stager` is not None."""

    def __init__(self, saver: CheckpointSaver, stager: Any):
        self.saver, saver.stager = saver, stager
        self.before_update = saver.before_update

    def published_as(self, step: int) -> Path:
        return self.saver.checkpoints.folder / step_name(step) / MANIFEST

    def save(self, step: int) -> None:
        self.saver.save(step, None)

    def finish(self) -> None:
        self.saver.finish()

    def close(self) -> None:
        self.saver.stager = None
        gc.collect()


class KeptStager(DefaultStager):
    """torch 2.11's async_save closes the stager after each save, with its memory; torch 2.13's does not."""

    def close(self) -> None: ...

    def free(self) -> None:
        super().close()


class Torch:
    """torch.distributed.checkpoint.async_save of weights and optimizer state, staged in pinned memory."""

    def __init__(self, saver: CheckpointSaver):
        self.state, self.folder = saver.run, saver.checkpoints.folder.with_name("torch")
        on_gpu = self.state.strategy.device.type == "cuda"
        options = StagingOptions(
            use_pinned_memory=on_gpu,
            use_shared_memory=False,
            use_async_staging=True,
            use_non_blocking_copy=on_gpu,
        )
        self.options: dict[str, Any] = {"async_stager": KeptStager(options)}
        if ranks.world_size() == 1:
            self.options["no_dist"] = True
        else:
            group = dist.new_group(backend="gloo", timeout=ranks.COLLECTIVE_TIMEOUT)
            self.options["process_group"] = group
        self.pending: Any = None

    def published_as(self, step: int) -> Path:
        return self.folder / step_name(step) / ".metadata"

    def save(self, step: int) -> None:
        state = self.state
        live, _ = weights_and_optimizer(state.model, state.optimizer, state.strategy, state.cfg)
        tensors = {name: tensor.detach() for name, tensor in live.items()}  # it cannot copy Parameters
        # torch's default is one thread; with as many as the suite's it is the faster opponent.
        writer = dcp.FileSystemWriter(self.folder / step_name(step), thread_count=THREADS)
        self.pending = dcp.async_save(tensors, storage_writer=writer, **self.options)

    def before_update(self) -> None:
        if self.pending:
            self.pending.staging_completion.result()

    def finish(self) -> None:
        self.pending.upload_completion.result()
        self.pending = None

    def close(self) -> None:
        self.options["async_stager"].free()
