"""Checkpoint storage: atomic saves with torch.distributed.checkpoint, verified before loading.

    checkpoints/step_000100/*.safetensors     every rank's shards
    checkpoints/step_000100/meta.json         the caller's JSON
    checkpoints/step_000100/manifest.json     shape and dtype of every tensor, size and checksum of every file

The format is the same in every sharding mode. No file is a pickle.
"""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from fp8_suite.core.errors import EXIT_BAD_SETTING, UserError
from fp8_suite.core.files import hidden, publish, save_tensors, write_json, write_remedy
from fp8_suite.core.readers import read_json
from fp8_suite.training.checkpoint import index
from fp8_suite.training.checkpoint.index import step_name
from fp8_suite.training.checkpoint.manifest import THREADS, digests, read_manifest, write_manifest
from fp8_suite.training.parallel import ranks
from torch import Tensor

META = "meta.json"


class Checkpoints:
    """The checkpoints of one run, in `folder` = <run>/checkpoints."""

    file_bytes = 2**30  # maximum bytes that a writer thread copies from the GPU at a time

    def __init__(self, folder: Path, *, keep_last: int, on_progress: Callable[[], None] = lambda: None):
        """`on_progress` is called after every file that a save writes or hashes."""
        self.folder = Path(folder)
        self.keep_last, self.on_progress = keep_last, on_progress

    def save(
        self, step: int, tensors: dict[str, Tensor], meta: dict, *, eval_loss: float | None = None
    ) -> Path:
        """Save `tensors` bit-exactly as `step`, prune old checkpoints, return the folder. Collective.

        Tensors are plain or DTensors and share no memory. Ranks may have different keys; a plain tensor with
        the same key must be equal on all ranks. `meta` (JSON) and `eval_loss` are read on rank 0. If any rank
        fails, all raise (UserError if writing failed), and earlier checkpoints stay intact.
        """
        final = self.folder / step_name(step)
        partial = hidden(final, "partial")
        try:
            ranks.run_on_rank0(lambda: self._begin(partial, meta))
            specs = _specs_of_all_ranks(tensors)
            writer = _Writer(partial, self.file_bytes, self.on_progress)
            planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            _run_dcp(dcp.save, tensors, storage_writer=writer, planner=planner)
            self._seal(partial, step, specs)
            ranks.run_on_rank0(lambda: self._publish(partial, final, step, eval_loss))
        except OSError as error:
            reason, remedy = error.strerror or error, write_remedy(error)
            earlier = index.step_folders(self.folder)
            if remedy == "free space" and earlier and self.keep_last > 1:
                remedy += f" or lower --keep_last (now {self.keep_last})"
            remedy += f", then rerun with `--output_dir {self.folder.parent}`"
            if earlier:
                remedy = f"earlier ones are intact; {remedy} to resume"
            failure = UserError(f"{final}: cannot write this checkpoint: {reason}; {remedy}")
            failure.ranks = error.ranks  # set by ranks.run_on_all_ranks or _run_dcp
            raise failure from None
        finally:
            if ranks.rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
        return final

    def record_eval_loss(self, step: int, eval_loss: float) -> None:
        """Add the eval loss to a checkpoint that was saved before its evaluation, and prune. Collective.

        Does nothing if the checkpoint was deleted meanwhile, such as by hand to free space.
        """

        def record() -> None:
            saved = index.read_index(self.folder, rebuild=True)
            if step not in saved.steps:
                return
            saved = replace(saved, eval_losses=saved.eval_losses | {step: eval_loss})
            index.write_index(self.folder, index.prune(self.folder, saved, self.keep_last))

        ranks.run_on_rank0(record)

    def latest(self) -> Path | None:
        """Return the last saved step folder, not verified, or None."""
        return index.latest(self.folder)

    def load(self, path: Path, tensors: dict[str, Tensor]) -> None:
        """Verify the checkpoint and load `tensors` in place. Collective.

        `tensors` may be on any device and sharded in any way. UserError if a key is missing or has another
        shape or dtype. Ranks share the verification, and each reads only its own shards.
        """
        ranks.run_on_all_ranks(lambda: _check_before_load(path, tensors))
        self.read(path, tensors)

    def read(self, path: Path, tensors: dict[str, Tensor]) -> None:
        """Load `tensors` in place from a verified checkpoint; keys, shapes, dtypes must match. Collective."""
        reader = dcp.HuggingFaceStorageReader(str(path), thread_count=THREADS)
        planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        _run_dcp(dcp.load, tensors, storage_reader=reader, planner=planner)

    def read_meta(self, path: Path) -> dict:
        """Return the verified `meta` of a checkpoint."""
        index.verify(path, [META])
        return read_json(path / META)

    def shapes(self, path: Path) -> dict[str, torch.Size]:
        """Return the shapes of a checkpoint's tensors by name, from its verified manifest."""
        return {name: torch.Size(spec["shape"]) for name, spec in read_manifest(path)["tensors"].items()}

    # Steps of a save, in order

    def _begin(self, partial: Path, meta: dict) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        # Prune before saving, so that a lower --keep_last frees space on a full disk.
        index.prune(self.folder, index.read_index(self.folder, rebuild=True), self.keep_last)
        for pattern in (".step_*.partial", ".step_*.pruned"):
            for leftover in self.folder.glob(pattern):
                shutil.rmtree(leftover)
        partial.mkdir()
        write_json(partial / META, meta)

    def _seal(self, partial: Path, step: int, specs: dict[str, dict]) -> None:
        """Flush and hash every file, split over the ranks, then write the manifest."""
        names = ranks.run_on_rank0(lambda: sorted(path.name for path in partial.iterdir()))
        share = names[ranks.rank() :: ranks.world_size()]
        shares = ranks.run_on_all_ranks(
            lambda: digests(partial, share, flush=True, on_progress=self.on_progress)
        )
        files = {name: digest for share in shares for name, digest in share.items()}
        ranks.run_on_rank0(lambda: write_manifest(partial, {"step": step, "files": files, "tensors": specs}))

    def _publish(self, partial: Path, final: Path, step: int, eval_loss: float | None) -> None:
        saved = index.read_index(self.folder, rebuild=True)
        publish(partial, final)
        losses = {number: loss for number, loss in saved.eval_losses.items() if number != step}
        if eval_loss is not None:
            losses[step] = eval_loss
        steps = [*(number for number in saved.steps if number != step), step]
        saved = replace(saved, steps=steps, eval_losses=losses)
        index.write_index(self.folder, index.prune(self.folder, saved, self.keep_last))


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


def _run_dcp(function: Callable, tensors: dict[str, Tensor], **options: Any) -> None:
    """Call dcp.save or dcp.load. Raise the error of the first failing rank, disk errors first."""
    detached = {key: tensor.detach() for key, tensor in tensors.items()}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # on a single process
            function(detached, no_dist=ranks.world_size() == 1, **options)
    except dcp.CheckpointException as failure:
        errors = [error for _, (error, _) in sorted(failure.failures.items())]
        cause = min(errors, key=lambda error: not isinstance(error, OSError))
        cause.ranks = dict.fromkeys(failure.failures, "")
        raise cause from None


def _as_stored(tensor: Tensor) -> Tensor:
    # safetensors' torch reader does not know the E8M0 scales of MXFP8, so float8 is stored as uint8.
    float8 = tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point
    return tensor.view(torch.uint8) if float8 else tensor


def _spec(tensor: Tensor) -> dict:
    return {"dtype": str(tensor.dtype), "shape": list(tensor.shape)}


def _specs_of_all_ranks(tensors: dict[str, Tensor]) -> dict[str, dict]:
    """Return shape and dtype of the tensors of all ranks, by key."""
    specs: dict[str, dict] = {}
    for rank_specs in ranks.gather({key: _spec(tensor) for key, tensor in tensors.items()}):
        for key, spec in rank_specs.items():
            same = specs.setdefault(key, spec) == spec
            assert same, f"tensor {key!r} is {specs[key]} on one rank and {spec} on another"
    return specs


def _check_before_load(path: Path, tensors: dict[str, Tensor]) -> None:
    saved = index.verify(path, share=(ranks.rank(), ranks.world_size()))["tensors"]
    for key, tensor in tensors.items():
        stored, live = saved.get(key), _spec(tensor)
        if stored != live:
            reason = (
                f"is {stored} in the checkpoint, but {live} here" if stored else "is not in the checkpoint"
            )
            raise UserError(f"{path}: tensor {key!r} {reason}", flags=("resume",), exit_code=EXIT_BAD_SETTING)


class _SavePlanner(dcp.DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Tensor:
        return _as_stored(object).contiguous()  # safetensors requires contiguous tensors


class _LoadPlanner(dcp.DefaultLoadPlanner):
    def transform_tensor(self, read_item: Any, tensor: Tensor) -> Tensor:
        return _as_stored(super().transform_tensor(read_item, tensor))


class _Writer(dcp.FileSystemWriter):
    """Writes this rank's part of the plan to safetensors files that HuggingFaceStorageReader can read.

    torch's HuggingFaceStorageWriter needs host memory for twice a file's size, and it drops errors of its
    threads, so a full disk goes unnoticed.
    """

    def __init__(self, folder: Path, file_bytes: int, on_progress: Callable[[], None]):
        super().__init__(folder)
        self.folder, self.file_bytes, self.on_progress = folder, file_bytes, on_progress

    def finish(self, metadata: Any, results: Any) -> None:
        """Write no .metadata file, which is a pickle. Each file describes its shards."""

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> torch.futures.Future[list]:
        def nbytes(item: dcp.WriteItem) -> int:
            data = item.tensor_data
            return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize

        files = list(in_groups(plan.items, nbytes, self.file_bytes)) or [[]]
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda number: self._write(number, files[number], planner), range(len(files))))
        done: torch.futures.Future[list] = torch.futures.Future()
        done.set_result([])
        return done

    def _write(self, number: int, items: list[dcp.WriteItem], planner: dcp.SavePlanner) -> None:
        path = self.folder / f"rank{ranks.rank():05d}-{number:05d}.safetensors"
        tensors = {item.index.fqn: planner.resolve_data(item).cpu() for item in items}
        # The reader needs each shard's offset in the full tensor.
        shards = {item.index.fqn: {"saved_offsets": list(item.tensor_data.chunk.offsets)} for item in items}
        save_tensors(tensors, path, {"DCP_SHARDING_INFO": json.dumps(shards)})
        self.on_progress()
