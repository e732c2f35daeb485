"""Checkpoints that are published whole or not at all, and checked before anything in them is read.

    checkpoints/index.json                    latest, best, best_eval_loss; steps in the order they were saved
    checkpoints/step_000100/*.safetensors     every rank's shards (torch.distributed.checkpoint)
    checkpoints/step_000100/meta.json         the caller's JSON
    checkpoints/step_000100/manifest.json     shape and dtype of every tensor, size and checksum of every file

A hidden folder is never a checkpoint: `.step_N.partial` is being written, `.step_N.replaced` gave way to a
new save of the same step, `.step_N.pruned` is being deleted. No file is ever unpickled.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from core.files import (
    MANIFEST,
    THREADS,
    DamagedCheckpoint,
    digests,
    hidden,
    inspect_checkpoint,
    no_room,
    publish,
    read_manifest,
    recover,
    save_tensors,
    write_json,
    write_manifest,
)
from training.parallel import ranks

INDEX, META = "index.json", "meta.json"
STEP = re.compile(r"step_(\d{6,})")


def step_name(step: int) -> str:
    """The name of a step's folder, as STEP reads it."""
    return f"step_{step:06d}"


# What safetensors stores; float8 comes on top, see `_as_stored`.
STORED = {torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64}
STORED |= {torch.int8, torch.int16, torch.int32, torch.int64}
STORED |= {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64}


class Checkpoints:
    """The checkpoints of one run, in `folder` = <run>/checkpoints; every rank calls what is collective."""

    file_bytes = 2**30  # a save copies this much per writer thread from the GPU, and nothing from the CPU

    def __init__(self, folder: Path, *, keep_last: int, beat: Callable[[], None] = lambda: None):
        """`beat` is called while a save makes progress."""
        self.folder = Path(folder)
        self.keep_last, self.beat = keep_last, beat

    def save(
        self, step: int, tensors: dict[str, Tensor], meta: dict, *, eval_loss: float | None = None
    ) -> Path:
        """Write `tensors` bit by bit, publish them as `step`, then prune; returns the folder. Collective.

        Tensors are plain ones or DTensors, of any shape and layout, that share no memory. Ranks may have keys
        of their own; a plain tensor that several ranks give must be equal on them. Rank 0's `meta` (JSON) and
        `eval_loss` count. On any error every rank raises (RuntimeError where writing failed) and the earlier
        checkpoints are untouched.
        """
        final = self.folder / step_name(step)
        partial = hidden(final, "partial")
        try:
            ranks.run_on_rank0(lambda: self._begin(partial, meta))
            specs = self._specs(tensors)
            self._write_tensors(partial, tensors)
            self._seal(partial, step, specs)
            ranks.run_on_rank0(lambda: self._publish(partial, step, eval_loss))
        except (Exception, dcp.CheckpointException) as error:
            if ranks.rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
            cause = _cause(error)
            if not isinstance(cause, OSError):
                raise cause from None
            failure = RuntimeError(self._write_failed(final, cause))
            failure.ranks = getattr(cause, "ranks", None) or dict.fromkeys(_failed_ranks(error), "")
            raise failure from cause
        ranks.run_on_rank0(self._prune)
        return final

    def rate(self, step: int, eval_loss: float) -> None:
        """Note the evaluation of a checkpoint that was saved before it, and prune. Collective."""
        ranks.run_on_rank0(lambda: self._rate(step, eval_loss))
        ranks.run_on_rank0(self._prune)

    def _rate(self, step: int, eval_loss: float) -> None:
        saved = self._saved()
        self._note(saved._replace(losses=saved.losses | {step: eval_loss}))

    def forget_evaluations(self) -> None:
        """On one process: of other data they say nothing about the next ones."""
        if (saved := self._saved()).losses:
            self._note(saved._replace(losses={}))

    def holds(self, path: Path) -> bool:
        """Whether a step's folder is this run's own."""
        return path.resolve().parent == self.folder.resolve()

    def covers(self, path: Path) -> bool:
        """Whether a path that --resume may have is this folder, its run's, or inside of it."""
        path, own = path.resolve(), self.folder.resolve()
        return own in (path, *path.parents, path / "checkpoints")

    def go_back(self, path: Path) -> None:
        """Note, on one process, that a start goes on from `path` and leaves any later steps.

        None of these is the best any more: their log lines are no longer the run's.
        """
        step, saved = read_manifest(path)["step"], self._saved()
        if not self.holds(path) or step not in saved.steps:
            return
        others = [other for other in saved.steps if other != step]
        losses = {other: loss for other, loss in saved.losses.items() if other <= step}
        self._note(_Saved([*others, step], losses, step))

    def since(self, path: Path) -> Path | None:
        """The step saved last, if that was after a start went back to `path`, which may be pruned since.

        None, with a warning, where it is damaged and `path` the newest intact one, as its error says.
        """
        self._recover()
        match = STEP.fullmatch(path.name)
        try:
            with self._offering(self.folder):
                back = self._read_index().went_back
            if not match or int(match[1]) != back:
                return None
            latest = self.latest()
            if latest and latest.name != path.name:
                self.verify(latest)
                return latest
        except DamagedCheckpoint as error:
            if error.intact is None or error.intact.resolve() != path.resolve():
                raise
            warnings.warn(f"{error}, as it does", stacklevel=2)
        return None

    def _note(self, saved: _Saved) -> None:
        try:
            self._write_index(saved)
        except OSError as error:
            raise no_room(self.folder / INDEX, error) from None

    def eval_losses(self, path: Path) -> dict[int, float]:
        """Evaluation losses of the checkpoints beside `path` up to its own, by step."""
        name = STEP.fullmatch(path.name)
        losses = Checkpoints(path.parent, keep_last=self.keep_last)._saved().losses if name else {}
        return {step: loss for step, loss in losses.items() if step <= int(name[1])}

    def latest(self) -> Path | None:
        """The step folder saved last, or None; DamagedCheckpoint if it is gone or the index unreadable."""
        self._recover()
        with self._offering(self.folder):
            index = self._read_index()
        folders = self._folders()  # after the index: a run that is saving meanwhile only adds newer ones
        # A folder that the index does not know was published by a save that died before it wrote the index.
        if unknown := folders.keys() - set(index.steps):
            return folders[max(unknown)]
        if not index.steps:
            return None
        path = self.folder / step_name(index.steps[-1])
        with self._offering(path):
            if not path.is_dir():
                raise DamagedCheckpoint(f"{path}: the folder is gone, but {INDEX} names it as the latest")
        return path

    def verify(self, path: Path) -> None:
        """Read every byte; DamagedCheckpoint if a file is missing, truncated, changed or foreign."""
        with self._offering(Path(path)):
            inspect_checkpoint(Path(path))

    def load(self, path: Path, tensors: dict[str, Tensor]) -> dict:
        """Verify, fill `tensors` in place whatever their device and sharding, return meta. Collective.

        ValueError names a key that is missing, or has another shape or dtype there: nothing is cast.
        Ranks share the verification, and each reads only what it holds.
        """
        path = Path(path)
        ranks.run_on_all_ranks(lambda: self._check_before_load(path, tensors))
        reader = dcp.HuggingFaceStorageReader(str(path), thread_count=THREADS)
        planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            with _quiet():
                detached = {key: tensor.detach() for key, tensor in tensors.items()}
                dcp.load(detached, storage_reader=reader, planner=planner, no_dist=ranks.world_size() == 1)
        except dcp.CheckpointException as error:
            raise _cause(error) from None
        return ranks.run_on_all_ranks(lambda: self.read_meta(path))[0]

    def read_meta(self, path: Path) -> dict:
        """The `meta` of a checkpoint, verified, without its tensors."""
        with self._offering(Path(path)):
            inspect_checkpoint(Path(path), [META])
        return json.loads((Path(path) / META).read_bytes())

    def shapes(self, path: Path) -> dict[str, torch.Size]:
        """Shapes of the tensors in a checkpoint by name, from its verified manifest."""
        with self._offering(Path(path)):
            tensors = read_manifest(Path(path))["tensors"]
        return {name: torch.Size(spec["shape"]) for name, spec in tensors.items()}

    # Saving, in order

    def _begin(self, partial: Path, meta: dict) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._recover()
        self._prune()  # where there was no room, a lower `keep_last` makes some
        for pattern in (".step_*.partial", ".step_*.pruned"):
            for leftover in self.folder.glob(pattern):
                shutil.rmtree(leftover)
        partial.mkdir()
        write_json(partial / META, meta)

    def _specs(self, tensors: dict[str, Tensor]) -> dict[str, dict]:
        """Shape and dtype of every rank's tensors."""
        specs: dict[str, dict] = {}
        for own in ranks.run_on_all_ranks(
            lambda: {key: _spec(key, tensor) for key, tensor in tensors.items()}
        ):
            for key, spec in own.items():
                if specs.setdefault(key, spec) != spec:
                    raise ValueError(f"tensor {key!r} is {specs[key]} on one rank and {spec} on another")
        return specs

    def _write_tensors(self, partial: Path, tensors: dict[str, Tensor]) -> None:
        writer = _Writer(partial, f"rank{ranks.rank():05d}", self.file_bytes, self.beat)
        planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with _quiet():
            detached = {key: tensor.detach() for key, tensor in tensors.items()}
            dcp.save(detached, storage_writer=writer, planner=planner, no_dist=ranks.world_size() == 1)

    def _seal(self, partial: Path, step: int, specs: dict[str, dict]) -> None:
        """Flush and checksum every file, shared out over the ranks, then write the manifest."""
        names = ranks.run_on_rank0(lambda: sorted(path.name for path in partial.iterdir()))
        shares = ranks.run_on_all_ranks(
            lambda: digests(partial, names[ranks.rank() :: ranks.world_size()], flush=True, beat=self.beat)
        )
        files = {name: digest for share in shares for name, digest in share.items()}
        ranks.run_on_rank0(lambda: write_manifest(partial, {"step": step, "files": files, "tensors": specs}))

    def _publish(self, partial: Path, step: int, eval_loss: float | None) -> None:
        saved = self._saved()
        publish(partial, self.folder / step_name(step))
        saved.losses.pop(step, None)  # of the checkpoint that was replaced
        if eval_loss is not None:
            saved.losses[step] = eval_loss
        self._write_index(saved._replace(steps=[*(s for s in saved.steps if s != step), step]))

    def _prune(self) -> None:
        """Delete all but the newest `keep_last` and the best; renamed first, so none is seen half deleted."""
        saved = self._saved()
        keep = {*saved.steps[-self.keep_last :], _best(saved.losses)}
        doomed = [self.folder / step_name(step) for step in saved.steps if step not in keep]
        try:
            for path in doomed:
                os.rename(path, hidden(path, "pruned"))
            if doomed:
                self._write_index(saved._replace(steps=[step for step in saved.steps if step in keep]))
            for path in doomed:
                shutil.rmtree(hidden(path, "pruned"))
        except OSError as error:
            warnings.warn(f"{self.folder}: an old checkpoint could not be deleted: {error}", stacklevel=2)

    def _write_failed(self, final: Path, cause: OSError) -> str:
        steps = self._saved().steps
        message = f"{final}: this checkpoint could not be written: {cause.strerror or cause}; "
        if not steps:
            return message + "there is no earlier one. Free space, or point --output_dir at another disk"
        previous = self.folder / step_name(steps[-1])
        lower = f", lower --keep_last (now {self.keep_last})" if self.keep_last > 1 else ""
        return message + (
            f"nothing saved earlier is lost. Free space{lower} and go on with `--output_dir "
            f"{self.folder.parent}`, or point --output_dir at another disk, with `--resume {previous}`"
        )

    # Loading

    def _check_before_load(self, path: Path, tensors: dict[str, Tensor]) -> None:
        with self._offering(path):
            manifest = inspect_checkpoint(path, share=(ranks.rank(), ranks.world_size()))
        for key, tensor in tensors.items():
            if key not in manifest["tensors"]:
                raise ValueError(f"{path}: the checkpoint has no tensor {key!r}")
            there, here = manifest["tensors"][key], _spec(key, tensor)
            if there != here:
                raise ValueError(f"{path}: tensor {key!r} is {there} in the checkpoint, but {here} here")

    @contextlib.contextmanager
    def _offering(self, path: Path) -> Iterator[None]:
        """Complete a DamagedCheckpoint about `path` with the intact checkpoint beside it to resume from."""
        try:
            yield
        except DamagedCheckpoint as error:
            folder = self.folder if path == self.folder else path.parent
            intact = _newest_intact(folder, other_than=path)
            way_out = f"intact: `--resume {intact}`" if intact else f"no intact one is left in {folder}"
            raise DamagedCheckpoint(f"{error}; {way_out}", intact) from None

    # The index and the folders

    def _folders(self) -> dict[int, Path]:
        return _step_folders(self.folder)

    def _recover(self) -> None:
        for replaced in self.folder.glob(".step_*.replaced"):
            recover(self.folder / replaced.name[1 : -len(".replaced")])

    def _read_index(self) -> _Saved:
        path = self.folder / INDEX
        if not path.exists():
            return _Saved([], {}, None)
        try:
            index = json.loads(path.read_bytes())
            losses = {int(step): float(loss) for step, loss in index["eval_losses"].items()}
            steps, latest = [int(step) for step in index["steps"]], STEP.fullmatch(index["latest"])
            if not latest or int(latest[1]) != steps[-1]:
                raise ValueError(f"latest is {index['latest']!r}, of steps {index['steps']}")
            return _Saved(steps, losses, index.get("went_back"))
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise DamagedCheckpoint(f"{path}: unreadable ({type(error).__name__}: {error})") from None

    def _saved(self) -> _Saved:
        """The index, of what is on disk; steps without a manifest come first."""
        try:
            index = self._read_index()
        except DamagedCheckpoint as error:
            warnings.warn(f"{error}; made anew from the folders, without earlier evaluations", stacklevel=2)
            index = _Saved([], {}, None)
        folders = self._folders()
        steps = [step for step in index.steps if step in folders]
        steps += sorted(folders.keys() - set(steps))
        steps.sort(key=lambda step: (folders[step] / MANIFEST).is_file())
        losses = {step: loss for step, loss in index.losses.items() if step in folders}
        return index._replace(steps=steps, losses=losses)

    def _write_index(self, saved: _Saved) -> None:
        best = _best(saved.losses)
        index = {
            "latest": step_name(saved.steps[-1]),
            "best": None if best is None else step_name(best),
            "best_eval_loss": saved.losses.get(best),
            "steps": saved.steps,
            "eval_losses": {str(step): loss for step, loss in saved.losses.items() if step in saved.steps},
            "went_back": saved.went_back,
        }
        write_json(self.folder / INDEX, index)


class _Saved(NamedTuple):
    steps: list[int]  # in the order of saving
    losses: dict[int, float]  # of evaluations, by step
    went_back: int | None  # the step that a start was told to go on from last


def _best(losses: dict[int, float]) -> int | None:
    finite = {step: loss for step, loss in losses.items() if math.isfinite(loss)}
    return min(finite, key=finite.__getitem__, default=None)


def _step_folders(folder: Path) -> dict[int, Path]:
    paths = folder.iterdir() if folder.is_dir() else ()
    return {int(match[1]): path for path in paths if (match := STEP.fullmatch(path.name)) and path.is_dir()}


def _newest_intact(folder: Path, *, other_than: Path) -> Path | None:
    """The newest checkpoint before `other_than` that verifies, else the newest after it."""
    match = STEP.fullmatch(other_than.name)
    limit = int(match[1]) if match else math.inf
    folders = _step_folders(folder)
    for step in sorted(folders, key=lambda step: (step < limit, step), reverse=True):
        with contextlib.suppress(DamagedCheckpoint):
            if folders[step] != other_than:
                inspect_checkpoint(folders[step])
                return folders[step]
    return None


def resolve_resume(resume: str, checkpoints: Checkpoints) -> Path | None:
    """--resume as a step folder: `auto` (the latest if any), `none`, or a step, checkpoints or run folder."""
    if resume == "none":
        return None
    if resume == "auto":
        return checkpoints.latest()
    path = Path(resume).expanduser().resolve()
    # Another run's checkpoint is a start only, and so is an earlier one of this run: what came of it goes on.
    if not checkpoints.covers(path) and (latest := checkpoints.latest()):
        return latest
    if checkpoints.holds(path) and (newer := checkpoints.since(path)):
        return newer
    if path.is_dir() and (STEP.fullmatch(path.name) or (path / MANIFEST).is_file()):
        return path
    for folder in (path, path / "checkpoints"):
        if latest := Checkpoints(folder, keep_last=checkpoints.keep_last).latest():
            return latest
    raise ValueError(
        f"--resume {resume}: no checkpoint there; give a step_N folder, a run folder with checkpoints, "
        "auto or none"
    )


# Tensors in torch.distributed.checkpoint


def _is_float8(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1 and dtype.is_floating_point


def _as_stored(tensor: Tensor) -> Tensor:
    # float8 travels as its bytes: safetensors' torch reader has no name for the E8M0 scales of MXFP8.
    return tensor.view(torch.uint8) if _is_float8(tensor.dtype) else tensor


class _SavePlanner(dcp.DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Tensor:
        return _as_stored(object).contiguous()  # safetensors refuses strides


class _LoadPlanner(dcp.DefaultLoadPlanner):
    def transform_tensor(self, read_item: Any, tensor: Tensor) -> Tensor:
        return _as_stored(super().transform_tensor(read_item, tensor))


class _Writer(dcp.StorageWriter):
    """Writes what the plan gives this rank into safetensors files that HuggingFaceStorageReader can read.

    torch's own HuggingFaceStorageWriter serialises each file in memory first, at twice its size, and loses
    the errors of its threads, so that a full disk looks like success.
    """

    def __init__(self, folder: Path, prefix: str, file_bytes: int, beat: Callable[[], None]):
        self.folder, self.prefix, self.file_bytes, self.beat = folder, prefix, file_bytes, beat

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        return plans

    def finish(self, metadata: Any, results: Any) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> torch.futures.Future[list]:
        files: list[list[dcp.WriteItem]] = [[]]
        filled = 0
        for item in plan.items:
            data = item.tensor_data
            nbytes = math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
            if filled and filled + nbytes > self.file_bytes:
                files.append([])
                filled = 0
            files[-1].append(item)
            filled += nbytes
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(lambda number: self._write(number, files[number], planner), range(len(files))):
                self.beat()
        done: torch.futures.Future[list] = torch.futures.Future()
        done.set_result([])
        return done

    def _write(self, number: int, items: list[dcp.WriteItem], planner: dcp.SavePlanner) -> None:
        path = self.folder / f"{self.prefix}-{number:05d}.safetensors"
        tensors = {item.index.fqn: planner.resolve_data(item).cpu() for item in items}
        # Where each piece lies in its whole tensor, as the reader wants it.
        pieces = {item.index.fqn: {"saved_offsets": list(item.tensor_data.chunk.offsets)} for item in items}
        save_tensors(tensors, path, {"DCP_SHARDING_INFO": json.dumps(pieces)})


def _spec(key: str, tensor: Tensor) -> dict:
    if tensor.is_meta:
        raise ValueError(f"tensor {key!r} is on the meta device: nothing to save from or load into")
    if tensor.dtype not in STORED and not _is_float8(tensor.dtype):
        raise ValueError(f"tensor {key!r} is {tensor.dtype}, which safetensors cannot store")
    return {"dtype": str(tensor.dtype), "shape": list(tensor.shape)}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # One process without a process group is no mistake here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _failed_ranks(error: BaseException) -> list[int]:
    return sorted(error.failures) if isinstance(error, dcp.CheckpointException) else [ranks.rank()]


def _cause(error: BaseException) -> BaseException:
    """The first rank's own error inside a CheckpointException, a disk's first."""
    if not isinstance(error, dcp.CheckpointException):
        return error
    errors = [failure for _, (failure, _) in sorted(error.failures.items())]
    return next((e for e in errors if isinstance(e, OSError)), errors[0])
