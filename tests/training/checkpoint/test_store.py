"""Checkpoints are exact, atomic, verified, pruned, and the same for any number of ranks."""

import errno
import json
import os
import pickle
import re
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fp8_suite.core.errors import EXIT_BAD_SETTING, UserError
from fp8_suite.training.checkpoint import store
from fp8_suite.training.checkpoint.manifest import DamagedCheckpoint, verify
from fp8_suite.training.checkpoint.resume import eval_losses
from fp8_suite.training.checkpoint.staging import Stager
from fp8_suite.training.checkpoint.store import Checkpoints
from fp8_suite.training.optim.adamw import local
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.children import forked, preload, run_ranks
from tests.full_disk import disk_that_takes

CPU = torch.device("cpu")
torch.set_num_threads(1)

preload(__name__)


def filled(value: float) -> dict[str, torch.Tensor]:
    return {
        "weight": torch.full((6, 5), float(value)),
        "moment": torch.full((7,), value, dtype=torch.bfloat16),
    }


def empty_like(tensors: dict) -> dict[str, torch.Tensor]:
    return {key: torch.zeros(tensor.shape, dtype=tensor.dtype) for key, tensor in tensors.items()}


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def equal(loaded: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> bool:
    return all(raw_bytes(loaded[key]) == raw_bytes(tensor) for key, tensor in saved.items())


def holds(checkpoints: Checkpoints, path: Path, value: float) -> bool:
    target = empty_like(filled(0))
    checkpoints.load(path, target)
    return equal(target, filled(value))


def save_steps(folder: Path, *steps: int, keep_last: int = 9, **losses: float) -> Checkpoints:
    folder.parent.mkdir(exist_ok=True)
    checkpoints = Checkpoints(folder, keep_last=keep_last)
    for step in steps:
        checkpoints.save(step, filled(step), {"step": step})
        if (loss := losses.get(f"loss{step}")) is not None:
            checkpoints.record_eval_loss(step, loss)
    return checkpoints


def index_of(checkpoints: Checkpoints) -> dict:
    return json.loads((checkpoints.folder / "index.json").read_text())


def on_disk(checkpoints: Checkpoints) -> list[int]:
    """Steps on disk; a hidden or foreign folder is an error."""
    return sorted(
        int(path.name.removeprefix("step_")) for path in checkpoints.folder.iterdir() if path.is_dir()
    )


def shard_of(path: Path) -> Path:
    return min(path.glob("*.safetensors"))


# Exactness


def awkward_tensors() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (96,), dtype=torch.uint8, generator=g)  # any bit pattern, NaNs too
    dtypes = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.bfloat16, torch.float16)
    dtypes += (torch.float32, torch.float64, torch.int8, torch.int16, torch.int64, torch.uint8, torch.uint16)
    tensors = {f"any.{dtype}": noise.view(dtype).reshape(3, -1).clone() for dtype in dtypes}
    return tensors | {
        "bool": torch.tensor([[True, False], [False, False]]),
        "0-d": torch.tensor(3.25, dtype=torch.float64),
        "0-d step": torch.tensor(7),
        "0-d float8": torch.tensor(0.5).to(torch.float8_e4m3fn),
        "empty": torch.empty(0),
        "empty rows": torch.empty(0, 4, dtype=torch.bfloat16),
        "empty columns": torch.empty(3, 0, dtype=torch.float8_e5m2),
        "transposed": torch.randn(4, 6, generator=g).t(),
        "strided": torch.randn(5, 8, generator=g)[1:4, ::3],
        "expanded": torch.randn(3, 1, generator=g).expand(3, 4),
        "slice": torch.arange(100.0)[10:20],
        "parameter": torch.nn.Parameter(torch.randn(3, generator=g)),
    }


@pytest.mark.parametrize("file_bytes", [2**31, 64], ids=["one file", "many files"])
def test_every_kind_of_tensor_is_restored_bit_by_bit(tmp_path, file_bytes):
    progress = []
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.file_bytes, checkpoints.on_progress = file_bytes, lambda: progress.append(1)
    tensors, meta = awkward_tensors(), {"step": 100, "nested": {"list": [1, 2.5, None, "x"]}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = checkpoints.save(100, tensors, meta)
        assert path == tmp_path / "step_000100" and checkpoints.shapes(path).keys() == tensors.keys()
        assert all(checkpoints.shapes(path)[key] == tensor.shape for key, tensor in tensors.items())
        shards = list(path.glob("*.safetensors"))
        assert (len(shards) > 5) == (file_bytes == 64) and len(progress) == len(shards)
        target = empty_like(tensors) | {"transposed": torch.zeros(4, 6).t(), "slice": torch.zeros(50)[5:15]}
        before = dict(target)
        checkpoints.load(path, target)
        assert checkpoints.read_meta(path) == meta
    assert all(target[key] is before[key] for key in tensors), "filled in place"
    assert all(target[key].dtype == tensor.dtype for key, tensor in tensors.items())
    assert equal(target, tensors)
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1, "shards are readable like other files"


@pytest.mark.parametrize(
    ("key", "tensor", "reason"),
    [
        ("other", torch.zeros(1), "'other' is not in the checkpoint"),
        ("weight", torch.zeros(6, 4), r"'weight'.*\[6, 5\].*\[6, 4\]"),
        ("weight", torch.zeros(6, 5, dtype=torch.float64), "'weight'.*float32.*float64"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named_and_nothing_is_loaded(tmp_path, key, tensor, reason):
    checkpoints, target = save_steps(tmp_path, 1), filled(9) | {key: tensor}
    with pytest.raises(UserError, match=reason):
        checkpoints.load(tmp_path / "step_000001", target)
    assert torch.equal(target["moment"], filled(9)["moment"])


# Index and pruning


def test_the_newest_and_the_best_are_kept(tmp_path):
    checkpoints = save_steps(tmp_path, 1, 2, 3, 4, 5, keep_last=2, loss1=float("nan"), loss2=1.0, loss3=2.0)
    assert on_disk(checkpoints) == [2, 4, 5] and holds(checkpoints, tmp_path / "step_000002", 2)
    checkpoints.record_eval_loss(5, float("nan"))  # never the best
    index = index_of(checkpoints)
    assert index.pop("eval_losses").keys() == {"2", "5"}
    names = {"latest": "step_000005", "best": "step_000002", "rolled_back_to": None}
    assert index == names | {"best_eval_loss": 1.0, "steps": [2, 4, 5]}
    checkpoints.record_eval_loss(4, 0.25)
    assert on_disk(checkpoints) == [4, 5] and index_of(checkpoints)["best"] == "step_000004"
    assert eval_losses(tmp_path / "step_000004") == {4: 0.25}


def test_a_checkpoint_deleted_before_its_evaluation_stops_no_run(tmp_path):
    checkpoints = save_steps(tmp_path, 1, 2, keep_last=2)
    shutil.rmtree(tmp_path / "step_000002")
    checkpoints.record_eval_loss(2, 0.5)
    assert checkpoints.latest().name == "step_000001"


def test_latest_and_pruning_follow_the_order_of_saving(tmp_path):
    """A run resumed from an older step continues from what it saves now."""
    checkpoints = save_steps(tmp_path, 100, 200, 300, 250, keep_last=2, loss300=0.1)
    assert checkpoints.latest().name == "step_000250" and on_disk(checkpoints) == [250, 300]
    path = checkpoints.save(300, filled(11), {"again": True})
    assert holds(checkpoints, path, 11) and checkpoints.read_meta(path) == {"again": True}
    index = index_of(checkpoints)  # a step saved again loses its eval loss
    assert (index["steps"], index["eval_losses"]) == ([250, 300], {})


# Damage


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def change_manifest(path: Path) -> None:
    outer = json.loads((path / "manifest.json").read_text())
    outer["manifest"]["tensors"]["weight"]["shape"] = [5, 6]
    (path / "manifest.json").write_text(json.dumps(outer))


DAMAGE = {
    "truncated shard": (lambda p: os.truncate(shard_of(p), 100), "safetensors: has 100 of"),
    "longer shard": (lambda p: shard_of(p).write_bytes(shard_of(p).read_bytes() + b"0"), "has .* bytes"),
    "missing shard": (lambda p: shard_of(p).unlink(), "safetensors: No such file"),
    "flipped shard": (lambda p: flip(shard_of(p), -1), "safetensors: .*checksum"),
    "flipped length of a shard's header": (lambda p: flip(shard_of(p), 6), "safetensors: .*checksum"),
    "flipped name in a shard's header": (lambda p: flip(shard_of(p), 12), "safetensors: .*checksum"),
    "foreign shard": (lambda p: (p / "x.safetensors").write_bytes(b"?"), "x.safetensors: not in manifest"),
    "missing meta": (lambda p: (p / "meta.json").unlink(), "meta.json: No such file"),
    "garbled manifest": (lambda p: (p / "manifest.json").write_bytes(b"\xff{"), "manifest.json: not UTF-8"),
    "changed manifest": (change_manifest, "manifest.json: .*checksum"),
    "empty folder": (lambda p: [file.unlink() for file in p.iterdir()], "manifest.json: No such file"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(tmp_path, kind):
    checkpoints = save_steps(tmp_path, 1, 2, 3)
    damage, reason = DAMAGE[kind]
    path = tmp_path / "step_000002"
    damage(path)
    uses = [verify, lambda path: checkpoints.load(path, filled(0))]
    for use in uses + [checkpoints.read_meta] * ("flipped" not in kind):
        with pytest.raises(DamagedCheckpoint, match=reason) as caught:
            use(path)
        assert caught.value.exit_code == EXIT_BAD_SETTING
        assert str(path) in str(caught.value) and f"--resume {tmp_path}/step_000003" in str(caught.value)
    assert holds(checkpoints, tmp_path / "step_000003", 3)


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path):
    checkpoints = save_steps(tmp_path, 1, keep_last=1)
    (tmp_path / "step_000009").mkdir()
    assert checkpoints.latest().name == "step_000001"
    checkpoints.save(2, filled(2), {})
    assert on_disk(checkpoints) == [2, 9] and checkpoints.latest().name == "step_000002"


def test_a_planted_pickle_is_never_opened(tmp_path):
    checkpoints = save_steps(tmp_path, 1)
    path, opened, watching = checkpoints.latest(), set(), True
    planted = {".metadata", "model.pt", "__0_0.distcp", "meta.pkl"}
    for name in planted:
        (path / name).write_bytes(pickle.dumps(print))
    sys.addaudithook(lambda event, args: opened.add(str(args[0])) if watching and event == "open" else None)
    assert holds(checkpoints, path, 1)
    watching = False
    assert str(path / "meta.json") in opened, "the watch works"
    assert not planted & {Path(name).name for name in opened}


# Crashes and full disks


@pytest.mark.parametrize("num_bytes", [0, 30, 450], ids=["meta", "tensors", "manifest"])
def test_a_write_error_names_the_way_out_and_loses_nothing(tmp_path, num_bytes):
    checkpoints = save_steps(tmp_path / "checkpoints", 1)
    for step in (1, 2):  # saved again, and new
        message = rf"step_{step:06d}: .*{os.strerror(errno.EFBIG)}.*--output_dir {tmp_path}` to"
        with pytest.raises(UserError, match=message), disk_that_takes(num_bytes):
            checkpoints.save(step, filled(7), {})
        assert on_disk(checkpoints) == [1] and holds(checkpoints, checkpoints.latest(), 1)
    checkpoints.save(2, filled(2), {})
    assert holds(checkpoints, checkpoints.latest(), 2)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_folder_that_was_moved_is_not_made_again(tmp_path, asynchronous):
    """The run would go on in two folders, or beside the mount point of a disk that is gone."""
    run, moved = tmp_path / "run", tmp_path / "moved"
    checkpoints = save_steps(run / "checkpoints", 1)
    run.rename(moved)
    with pytest.raises(UserError, match=r"moved or deleted.*rerun with"):
        if asynchronous:
            checkpoints.start_save(2, filled(2), {}, Stager(CPU)).finish()
        else:
            checkpoints.save(2, filled(2), {})
    assert not run.exists()
    checkpoints = Checkpoints(moved / "checkpoints", keep_last=1)
    assert holds(checkpoints, checkpoints.latest(), 1)


def test_a_lower_keep_last_frees_space_before_the_next_save(tmp_path):
    save_steps(tmp_path, 1, 2, 3)
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    with pytest.raises(UserError, match="cannot write this checkpoint"), disk_that_takes(450):
        checkpoints.save(4, filled(4), {})
    assert on_disk(checkpoints) == [3]


def test_an_old_checkpoint_that_cannot_be_deleted_stops_no_run(tmp_path, monkeypatch):
    """As on NFS while a file in it is open."""
    rmdir = os.rmdir

    def busy(path, **options) -> None:
        if str(path).endswith(".pruned"):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        rmdir(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", busy)
        checkpoints = save_steps(tmp_path, 1, 2, 3, keep_last=1)
    assert index_of(checkpoints)["steps"] == [3] and holds(checkpoints, checkpoints.latest(), 3)
    checkpoints.save(4, filled(4), {})
    assert on_disk(checkpoints) == [4]


def save_and_die(folder: Path, step: int, asynchronous: bool, left: int) -> None:
    """Save a step, but SIGKILL this process just before its `left`-th change on disk."""

    def watch(event: str, args: tuple) -> None:
        nonlocal left
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    checkpoints = Checkpoints(folder, keep_last=1)
    if asynchronous:
        checkpoints.start_save(step, filled(5), {}, Stager(CPU)).finish()
    else:
        checkpoints.save(step, filled(5), {})


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("step", [2, 1], ids=["new step", "same step again"])
def test_a_kill_before_any_single_change_leaves_an_intact_checkpoint(tmp_path, step, asynchronous):
    for count in range(1, 60):
        folder = tmp_path / str(count)
        survivor = save_steps(folder, 1, keep_last=1)
        with forked(save_and_die, folder, step, asynchronous, count) as child:
            child.join()
        path = survivor.latest()
        for published in folder.glob("step_*"):
            verify(published)
        new = path.name == f"step_{step:06d}" and holds(survivor, path, 5)
        assert new or (path.name == "step_000001" and holds(survivor, path, 1))
        survivor.save(3, filled(3), {})
        assert holds(survivor, survivor.latest(), 3)
        assert on_disk(survivor) == [3], "leftovers are deleted"
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
    assert new and 10 < count < 59


# In the background


def test_a_save_in_the_background_holds_the_state_at_its_begin(tmp_path, monkeypatch):
    checkpoints, stager, live, writing = save_steps(tmp_path, 1), Stager(CPU), filled(2), threading.Event()
    write = store.write_tensors
    monkeypatch.setattr(store, "write_tensors", lambda *args: writing.wait() and write(*args))
    meta = {"loader": {"row": 2}}
    pending = checkpoints.start_save(2, live, meta, stager)
    stager.finish_copies()
    for tensor in live.values():
        tensor.fill_(3)
    meta["loader"]["row"] = 3
    checkpoints.record_eval_loss(2, 0.5)  # known before the checkpoint is published
    assert not pending.done() and checkpoints.latest().name == "step_000001"
    writing.set()
    path = pending.finish()
    assert path == checkpoints.latest() and holds(checkpoints, path, 2)
    assert checkpoints.read_meta(path) == {"loader": {"row": 2}}
    assert index_of(checkpoints)["eval_losses"] == {"2": 0.5}


def test_a_write_error_in_the_background_is_raised_when_the_save_is_finished(tmp_path):
    checkpoints, message = save_steps(tmp_path, 1), "step_000002: cannot write this .*to resume"
    with disk_that_takes(450):
        pending = checkpoints.start_save(2, filled(2), {}, Stager(CPU))
        with pytest.raises(UserError, match=message):
            pending.finish()
    assert on_disk(checkpoints) == [1] and not list(tmp_path.glob(".step*"))


# Ranks


def full_tensors() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return {
        "even": torch.randn(4, 3, generator=g),
        "uneven": torch.randn(5, 3, generator=g).to(torch.bfloat16),
        "one row": torch.randn(1, 3, generator=g).to(torch.float8_e4m3fn),
        "columns": torch.randn(2, 5, generator=g),
        "replicated": torch.randn(3, generator=g),
        "plain": torch.arange(4, dtype=torch.int16),
        "0-d": torch.tensor(9),
        "no rows": torch.empty(0, 2),
    }


def distributed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layouts = {"columns": Shard(1), "replicated": Replicate()}

    def spread(key: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.float8_e4m3fn:  # scatter does not support float8
            bits = distribute_tensor(tensor.view(torch.uint8), mesh, [Shard(0)])
            local_shard = bits.to_local().view(tensor.dtype)
            shape, stride = tensor.shape, tensor.stride()
            return type(bits).from_local(local_shard, mesh, [Shard(0)], shape=shape, stride=stride)
        return distribute_tensor(tensor, mesh, [layouts.get(key, Shard(0))])

    return {key: t if key in ("plain", "0-d") else spread(key, t) for key, t in tensors.items()}


def load_shards(rank: int, folder: Path) -> None:
    checkpoints = Checkpoints(folder, keep_last=1)
    target = distributed(empty_like(full_tensors()))
    before = dict(target)
    checkpoints.load(checkpoints.latest(), target)
    assert all(target[key] is before[key] for key in target)
    expected = distributed(full_tensors())
    assert equal(*({key: local(t) for key, t in tensors.items()} for tensors in (target, expected)))


def save_shards(rank: int, folder: Path) -> None:
    load_shards(rank, folder / "one rank")
    checkpoints = Checkpoints(folder / "two ranks", keep_last=1)
    rng = {f"rng.{rank}": torch.full((3,), rank)}
    tensors = distributed(full_tensors()) | rng
    checkpoints.save(1, tensors, {"rank": rank})
    checkpoints.record_eval_loss(1, rank - 1)
    pending = checkpoints.start_save(2, tensors, {"rank": rank}, Stager(CPU))
    checkpoints.record_eval_loss(2, rank - 2)
    pending.finish()


def test_shards_are_exact_on_any_number_of_ranks(tmp_path):
    Checkpoints(tmp_path / "one rank", keep_last=1).save(1, full_tensors(), {})
    run_ranks(save_shards, tmp_path)
    checkpoints = Checkpoints(tmp_path / "two ranks", keep_last=1)
    assert on_disk(checkpoints) == [2], "rank 0 pruned"
    path = checkpoints.latest()
    expected = full_tensors() | {"rng.0": torch.full((3,), 0), "rng.1": torch.full((3,), 1)}
    target = empty_like(expected)
    checkpoints.load(path, target)
    assert checkpoints.read_meta(path) == {"rank": 0} and equal(target, expected)
    assert checkpoints.shapes(path).keys() == expected.keys()
    run_ranks(load_shards, tmp_path / "two ranks", world_size=3)


MEGABYTES = {f"weight.{n}": torch.full((512, 1024), float(n)) for n in range(8)}  # 2 MB each


def bytes_read(work: Callable[[], None]) -> float:
    """Return the bytes that this process reads in `work`, as a multiple of MEGABYTES."""

    def so_far() -> int:
        return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])

    before = so_far()
    work()
    return (so_far() - before) / 2**24


def count_reads(rank: int, folder: Path) -> None:
    def load(tensors: dict[str, torch.Tensor]) -> float:
        counts = [None] * dist.get_world_size()
        path = checkpoints.latest()
        dist.all_gather_object(counts, bytes_read(lambda: checkpoints.load(path, tensors)))
        return sum(counts)

    checkpoints = Checkpoints(folder / "sharded", keep_last=1)
    checkpoints.file_bytes = 2**21
    if dist.get_world_size() == 2:
        checkpoints.save(1, distributed(MEGABYTES), {})
        replicas = empty_like(MEGABYTES)
        assert 1 <= load(replicas) < 1.1 and equal(replicas, MEGABYTES)
    assert 1 <= load(distributed(empty_like(MEGABYTES))) < 1.1


def test_ranks_read_one_copy_and_map_what_others_verify(tmp_path):
    run_ranks(count_reads, tmp_path)
    run_ranks(count_reads, tmp_path, world_size=3)


def errors_on_one_rank(rank: int, folder: Path) -> None:
    checkpoints = Checkpoints(folder / "checkpoints", keep_last=1)
    path = checkpoints.save(1, distributed(full_tensors()), {})

    def refused(error, match, work):
        with pytest.raises(error, match=match) as caught:
            work()
        return caught.value

    # Each of these fails on rank 1 only, and must raise on every rank.
    with disk_that_takes(200 if rank == 1 else 2**40):
        tensors = distributed(full_tensors()) | {f"big.{rank}": torch.zeros(100)}
        failure = refused(UserError, "step_000002.*too large", lambda: checkpoints.save(2, tensors, {}))
    assert 1 in failure.ranks
    unequal = {"x": torch.zeros(2 + rank)}
    refused(AssertionError, "'x' is .* on one rank", lambda: checkpoints.save(2, unequal, {}))
    missing = {"x": torch.zeros(2)} if rank else {}
    refused(UserError, "'x' is not in the checkpoint", lambda: checkpoints.load(path, missing))
    dist.barrier()
    assert on_disk(checkpoints) == [1]
    for file in sorted(path.glob("*.safetensors")):
        for expected in (DamagedCheckpoint, None):  # flipped once, then back
            dist.barrier()
            if rank == 0:
                flip(file, -1)
            dist.barrier()
            if expected:
                refused(expected, file.name, lambda: checkpoints.load(path, distributed(full_tensors())))
    checkpoints.load(path, distributed(full_tensors()))


def test_an_error_on_one_rank_reaches_all(tmp_path):
    run_ranks(errors_on_one_rank, tmp_path)
