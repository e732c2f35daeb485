"""Checkpoint storage: atomic saves with torch.distributed.checkpoint, verified by the pass that loads them.

    checkpoints/step_000100/*.safetensors     every rank's shards
    checkpoints/step_000100/meta.json         the caller's JSON
    checkpoints/step_000100/manifest.json     shape and dtype of every tensor, size and checksum of every file

The format is the same in every sharding mode. No file is a pickle.
"""

from __future__ import annotations

import json
import math
import shutil
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from fp8_suite.core.errors import EXIT_BAD_SETTING, UserError
from fp8_suite.core.files import hidden, publish, write_json, write_remedy
from fp8_suite.core.readers import read_json
from fp8_suite.te_models.parallel.tensor_parallel import Region
from fp8_suite.training.checkpoint import index
from fp8_suite.training.checkpoint.index import step_name
from fp8_suite.training.checkpoint.manifest import THREADS, digests, read_manifest, verify, write_manifest
from fp8_suite.training.checkpoint.planning import LoadPlanner, SavePlanner, tensor_spec
from fp8_suite.training.checkpoint.reader import Reader
from fp8_suite.training.checkpoint.staging import Stager, Unstaged
from fp8_suite.training.checkpoint.writer import write_tensors
from fp8_suite.training.parallel import ranks
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

META = "meta.json"


class Checkpoints:
    """The checkpoints of one run, in `folder` = <run>/checkpoints."""

    file_bytes = 2**30  # of a file, unless one tensor is larger

    def __init__(self, folder: Path, *, keep_last: int):
        self.folder, self.keep_last = Path(folder), keep_last
        self.on_progress: Callable[[], None] = lambda: None  # called by the thread that has written a file
        self.region: Callable[[str], Region | None] = lambda key: None  # of which this rank holds a part
        self._lock = threading.Lock()  # index.json: a save in the background, and `record_eval_loss`
        self._unpublished: dict[int, float | None] = {}  # eval loss of the step that is being saved
        self._group: Any = None  # process group of saves in the background

    def save(self, step: int, tensors: dict[str, Tensor], meta: dict) -> Path:
        """Save `tensors` bit-exactly as `step`, prune old checkpoints, return the folder. Collective.

        Tensors are plain or DTensors and share no memory. Ranks may have different keys; a plain tensor with
        the same key must be equal on all ranks, unless it is a part of one (`region`). `meta` (JSON)
        is read on rank 0. If any rank fails, all raise (UserError if writing failed), and earlier checkpoints
        stay intact.
        """
        options = self._options(step, meta)
        return self._finished(step, lambda: _run_dcp(dcp.save, tensors, **options))

    def start_save(
        self, step: int, tensors: dict[str, Tensor], meta: dict, stager: Stager | Unstaged
    ) -> PendingSave:
        """Begin a save like `save`, written and published in the background, one at a time. Collective.

        The tensors must not change before `stager.finish_copies()`.
        """
        if self._group is None and ranks.world_size() > 1:
            self._group = torch.distributed.new_group(backend="gloo", timeout=ranks.COLLECTIVE_TIMEOUT)
        options = self._options(step, json.loads(json.dumps(meta)))
        options |= {"async_stager": stager, "process_group": self._group}
        options["storage_writer"].on_written = stager.end_reading
        written: Future = _run_dcp(dcp.async_save, tensors, **options).upload_completion
        written.add_done_callback(lambda _: stager.end_reading())
        return PendingSave(written.done, lambda: self._finished(step, _raising_cause()(written.result)))

    def _options(self, step: int, meta: dict) -> dict[str, Any]:
        planner = SavePlanner(self.region)
        with self._lock:
            self._unpublished = {step: None}
        return {"storage_writer": _Writer(self, step, meta, planner), "planner": planner}

    def _finished(self, step: int, write: Callable[[], Any]) -> Path:
        """Return the folder of `step` once `write` has ended. UserError if the disk failed."""
        final = self.folder / step_name(step)
        try:
            write()
        except OSError as error:
            reason = f"cannot write this checkpoint: {error.strerror or error}"
            remedy = f"{write_remedy(error)}, then rerun with `--output_dir {self.folder.parent}` to resume"
            failure = UserError(f"{final}: {reason}; {remedy}")
            failure.ranks = error.ranks  # set by _raising_cause
            raise failure from None
        finally:
            if ranks.rank() == 0:
                shutil.rmtree(hidden(final, "partial"), ignore_errors=True)
        return final

    def record_eval_loss(self, step: int, eval_loss: float) -> None:
        """Add the eval loss to a checkpoint, which may still be written, and prune. Collective.

        Does nothing if the checkpoint was deleted meanwhile, such as by hand to free space.
        """

        def record() -> None:
            with self._lock:
                if step in self._unpublished:  # the save in the background will write it
                    self._unpublished[step] = eval_loss
                    return
                saved = index.read_index(self.folder)
                if step not in saved.steps:
                    return
                saved = replace(saved, eval_losses=saved.eval_losses | {step: eval_loss})
                index.write_index(self.folder, index.prune(self.folder, saved, self.keep_last))

        ranks.run_on_rank0(record)

    def latest(self) -> Path | None:
        """Return the last saved step folder, not verified, or None."""
        return index.latest(self.folder)

    def load(self, path: Path, tensors: dict[str, Tensor]) -> None:
        """Load `tensors` in place and verify every file in the same pass. Collective.

        `tensors` may be on any device and sharded in any way. UserError if a key is missing or has another
        shape or dtype. DamagedCheckpoint if a file is damaged; `tensors` may have its content then. Ranks
        share the verification, and each reads only its own shards otherwise.
        """
        files, *_ = ranks.run_on_all_ranks(lambda: _check_before_load(path, tensors, self.region))
        try:
            self.read(path, tensors, files)
        except Exception:  # damage may cause any error: name the file
            ranks.run_on_rank0(lambda: verify(path))
            raise

    def read(self, path: Path, tensors: dict[str, Tensor], files: dict[str, dict] | None = None) -> None:
        """Load `tensors` in place; keys, shapes and dtypes must match. Collective.

        `files` are to be verified in the same pass; other files must be verified already.
        """
        planner = LoadPlanner(self.region)
        _run_dcp(dcp.load, tensors, storage_reader=Reader(path, files or {}), planner=planner)

    def read_meta(self, path: Path) -> dict:
        """Return the verified `meta` of a checkpoint."""
        verify(path, [META])
        return read_json(path / META)

    def shapes(self, path: Path) -> dict[str, torch.Size]:
        """Return the shapes of a checkpoint's tensors by name, from its verified manifest."""
        return {name: torch.Size(spec["shape"]) for name, spec in read_manifest(path)["tensors"].items()}

    def delete_leftovers(self) -> None:
        """Delete what killed saves have left, if possible. On one process."""
        for pattern in (".step_*.partial", ".step_*.pruned"):
            for leftover in self.folder.glob(pattern):
                shutil.rmtree(leftover, ignore_errors=True)

    # Steps of a save, in order

    def begin(self, partial: Path, meta: dict) -> None:
        """Make the folder for a step's files, with `meta`. On one process."""
        self.folder.mkdir(exist_ok=True)  # without parents: a run whose folder was moved must not be split
        # Prune before saving, so that a lower --keep_last frees space on a full disk.
        index.prune(self.folder, index.read_index(self.folder), self.keep_last)
        self.delete_leftovers()
        partial.mkdir()
        write_json(partial / META, meta)

    def publish(self, partial: Path, step: int, manifest: dict[str, Any]) -> None:
        """Seal the folder with its manifest, rename it, and update the index. On one process."""
        write_manifest(partial, {"step": step} | manifest)
        with self._lock:
            saved = index.read_index(self.folder)
            publish(partial, self.folder / step_name(step))
            losses = {number: loss for number, loss in saved.eval_losses.items() if number != step}
            if (eval_loss := self._unpublished.pop(step)) is not None:
                losses[step] = eval_loss
            steps = [*(number for number in saved.steps if number != step), step]
            saved = replace(saved, steps=steps, eval_losses=losses)
            index.write_index(self.folder, index.prune(self.folder, saved, self.keep_last))


@dataclass(frozen=True)
class PendingSave:
    """A save in the background."""

    done: Callable[[], bool]
    finish: Callable[[], Path]  # waits, and returns the checkpoint or raises, as `Checkpoints.save` does


def in_groups(items: Iterable[Any], size_of: Callable[[Any], int], limit: int) -> Iterator[list[Any]]:
    """Group consecutive items up to a sum of sizes of `limit`, or one larger item."""
    group: list[Any] = []
    total = 0
    for item in items:
        if group and total + size_of(item) > limit:
            yield group
            group, total = [], 0
        group.append(item)
        total += size_of(item)
    if group:
        yield group


# Tensors in torch.distributed.checkpoint


@contextmanager
def _raising_cause() -> Iterator[None]:
    """Raise the error of the first failing rank, disk errors first, with all such ranks in `ranks`."""
    try:
        yield
    except dcp.CheckpointException as failure:
        errors = [error for _, (error, _) in sorted(failure.failures.items())]
        cause = min(errors, key=lambda error: not isinstance(error, OSError))
        cause.ranks = dict.fromkeys(failure.failures, "")
        raise cause from None


@_raising_cause()
def _run_dcp(function: Callable, tensors: dict[str, Tensor], **options: Any) -> Any:
    """Call dcp.save, dcp.async_save or dcp.load."""
    detached = {key: tensor.detach() for key, tensor in tensors.items()}
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # on a single process
    return function(detached, no_dist=ranks.world_size() == 1, **options)


def _check_before_load(
    path: Path, tensors: dict[str, Tensor], region: Callable[[str], Region | None]
) -> dict[str, dict]:
    """Return size and checksum of the checkpoint's files, if its tensors fit."""
    manifest = verify(path, [META])
    saved = manifest["tensors"]
    for key, tensor in tensors.items():
        shape = part.shape if (part := region(key)) else tensor.shape
        stored, live = saved.get(key), tensor_spec(tensor.dtype, shape)
        if stored != live:
            reason = f"is {stored or 'not'} in the checkpoint, but {live} here"
            raise UserError(f"{path}: tensor {key!r} {reason}", flags=("resume",), exit_code=EXIT_BAD_SETTING)
    return manifest["files"]


class _Writer(dcp.StorageWriter):
    """Writes this rank's part of the plan to safetensors files that HuggingFaceStorageReader can read.

    torch's HuggingFaceStorageWriter needs host memory for twice a file's size, and it drops errors of its
    threads, so a full disk goes unnoticed. The coordinator begins and publishes the checkpoint.
    """

    def __init__(self, checkpoints: Checkpoints, step: int, meta: dict, planner: SavePlanner):
        self.checkpoints, self.step, self.meta, self.planner = checkpoints, step, meta, planner
        self.partial = hidden(checkpoints.folder / step_name(step), "partial")
        self.on_written: Callable[[], None] = lambda: None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False

    def reset(self, checkpoint_id: Any = None) -> None: ...
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        self.checkpoints.begin(self.partial, self.meta)
        return plans

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> torch.futures.Future[list]:
        def nbytes(item: dcp.WriteItem) -> int:
            data = item.tensor_data
            return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize

        counts: Counter[str] = Counter()
        rounds: dict[int, list[dcp.WriteItem]] = {}  # a file has one piece of a tensor at most
        for item in plan.items:
            counts[item.index.fqn] += 1
            rounds.setdefault(counts[item.index.fqn], []).append(item)
        limit = self.checkpoints.file_bytes
        files = [file for items in rounds.values() for file in in_groups(items, nbytes, limit)] or [[]]
        with ThreadPoolExecutor(THREADS) as pool:
            results = list(pool.map(self._write, range(len(files)), files))
        self.on_written()  # the state in memory is not read any more
        done: torch.futures.Future[list] = torch.futures.Future()
        done.set_result(results)
        return done

    def _write(self, number: int, items: list[dcp.WriteItem]) -> WriteResult:
        path = self.partial / f"rank{ranks.rank():05d}-{number:05d}.safetensors"
        tensors = {item.index.fqn: self.planner.resolve_data(item) for item in items}
        # The reader needs each shard's offset in the full tensor.
        shards = {item.index.fqn: {"saved_offsets": list(item.tensor_data.chunk.offsets)} for item in items}
        digest = write_tensors(path, tensors, {"DCP_SHARDING_INFO": json.dumps(shards)})
        self.checkpoints.on_progress()
        return WriteResult(MetadataIndex(path.name), digest["size"], digest)

    def finish(self, metadata: Any, results: list[list[WriteResult]]) -> None:
        """Publish the checkpoint. DCP's own .metadata file, a pickle, is not written."""
        files = digests(self.partial, [META])
        files |= {file.index.fqn: file.storage_data for rank in results for file in rank}
        manifest = {"files": files, "tensors": self.planner.specs}
        self.checkpoints.publish(self.partial, self.step, manifest)
