"""Checkpoints: exact, atomic, verified, prunable, and the same over any number of ranks."""

import errno
import json
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from core import files as durable_files
from core.errors import UserError
from core.files import publish, replace_file
from tests.children import preload, run_ranks, start
from training.checkpoint.manifest import DamagedCheckpoint
from training.checkpoint.resume import resolve_resume
from training.checkpoint.state import rng_state, set_rng_state
from training.checkpoint.store import Checkpoints

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
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def holds(checkpoints: Checkpoints, path: Path, value: float) -> bool:
    target = empty_like(filled(0))
    checkpoints.load(path, target)
    return all(torch.equal(target[key], tensor) for key, tensor in filled(value).items())


def index_of(checkpoints: Checkpoints) -> dict:
    return json.loads((checkpoints.folder / "index.json").read_text())


def on_disk(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir() if path.is_dir())


def shard_of(path: Path) -> Path:
    return sorted(path.glob("*.safetensors"))[0]


# Exactness


def awkward_tensors() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (96,), dtype=torch.uint8, generator=g)  # any bit pattern, NaNs too
    dtypes = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.bfloat16, torch.float16)
    dtypes += (torch.float32, torch.float64, torch.int8, torch.int16, torch.int64, torch.uint8, torch.uint16)
    tensors = {f"any.{dtype}": noise.view(dtype).reshape(3, -1).clone() for dtype in dtypes}
    tensors |= {
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
    return tensors


@pytest.mark.parametrize("file_bytes", [2**31, 64], ids=["one file", "many files"])
def test_every_kind_of_tensor_comes_back_bit_by_bit(tmp_path, file_bytes):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.file_bytes = file_bytes
    tensors = awkward_tensors()
    meta = {"step": 100, "nested": {"list": [1, 2.5, None, "x"]}}
    path = checkpoints.save(100, tensors, meta)
    assert path == tmp_path / "step_000100"
    assert (len(list(path.glob("*.safetensors"))) > 5) == (file_bytes == 64)
    assert checkpoints.shapes(path) == {key: tensor.shape for key, tensor in tensors.items()}
    assert checkpoints.read_meta(path) == meta

    target = empty_like(tensors) | {"transposed": torch.zeros(4, 6).t(), "slice": torch.zeros(50)[5:15]}
    before = dict(target)
    assert checkpoints.load(path, target) == meta
    for key, tensor in tensors.items():
        assert target[key] is before[key], "filled in place"
        assert target[key].dtype == tensor.dtype and target[key].shape == tensor.shape
        assert raw_bytes(target[key]) == raw_bytes(tensor.detach()), key


def test_a_save_tells_that_it_makes_progress(tmp_path, monkeypatch):
    """After each file that is written, and after each that is checked."""
    beats = []
    checkpoints = Checkpoints(
        tmp_path, keep_last=1, on_progress=lambda: beats.append(len(list(tmp_path.rglob("*"))))
    )
    monkeypatch.setattr(Checkpoints, "file_bytes", 100)
    path = checkpoints.save(1, {f"t{i}": torch.zeros(25) for i in range(5)}, {})
    files = list(path.glob("*.safetensors"))
    assert len(files) == 5 and len(beats) >= 2 * len(files)


def test_a_part_of_a_checkpoint_can_be_loaded_and_nothing_at_all_saved(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    path = checkpoints.save(1, filled(4), {})
    target = {"moment": torch.zeros(7, dtype=torch.bfloat16)}
    checkpoints.load(path, target)
    assert torch.equal(target["moment"], filled(4)["moment"])
    path = checkpoints.save(2, {}, {"a": 1})
    assert checkpoints.load(path, {}) == {"a": 1} and checkpoints.shapes(path) == {}


def test_load_names_the_key_that_does_not_fit(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    path = checkpoints.save(1, filled(1), {})
    for target, named in [
        ({"other": torch.zeros(1)}, "'other'"),
        ({"weight": torch.zeros(6, 4)}, r"'weight'.*\[6, 5\].*\[6, 4\]"),
        ({"weight": torch.zeros(6, 5, dtype=torch.float64)}, "'weight'.*float32.*float64"),
    ]:
        untouched = filled(9) | target
        with pytest.raises(UserError, match=named):
            checkpoints.load(path, untouched)
        assert torch.equal(untouched["moment"], filled(9)["moment"])


def test_a_dtype_that_safetensors_lacks_is_refused_by_name(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    with pytest.raises(UserError, match=r"'z'.*complex128"):
        checkpoints.save(1, {"z": torch.zeros(2, dtype=torch.complex128)}, {})
    assert on_disk(checkpoints) == [] and checkpoints.latest() is None


def test_random_state_continues_every_generator(tmp_path):
    def draw():
        return (
            torch.rand(3).tolist(),
            random.gauss(0, 1),
            random.random(),
            np.random.standard_normal(3).tolist(),
        )

    random.gauss(0, 1), np.random.standard_normal()  # both generators now keep a second draw for later
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    path = checkpoints.save(1, rng_state(), {})
    expected = draw()
    state = rng_state()
    checkpoints.load(path, state)
    set_rng_state(state)
    assert draw() == expected


# What is kept


def test_the_newest_and_the_best_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    for step, loss in [(1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, float("nan"))]:
        checkpoints.save(step, filled(step), {}, eval_loss=loss)
    assert on_disk(checkpoints) == ["step_000002", "step_000004", "step_000005"]
    index = index_of(checkpoints)
    assert (index["latest"], index["best"], index["best_eval_loss"]) == ("step_000005", "step_000002", 1.0)
    assert index["steps"] == [2, 4, 5]

    checkpoints.save(6, filled(6), {}, eval_loss=0.25)
    assert (index_of(checkpoints)["best"], index_of(checkpoints)["best_eval_loss"]) == ("step_000006", 0.25)
    checkpoints.save(7, filled(7), {})
    checkpoints.save(8, filled(8), {})
    assert on_disk(checkpoints) == ["step_000006", "step_000007", "step_000008"]
    assert holds(checkpoints, tmp_path / "step_000006", 6)


def test_a_checkpoint_may_be_saved_before_it_is_evaluated(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    for step, loss in [(1, 2.0), (2, 1.0), (3, 3.0)]:
        checkpoints.save(step, filled(step), {})
        checkpoints.record_eval_loss(step, loss)
    assert on_disk(checkpoints) == ["step_000002", "step_000003"]
    index = index_of(checkpoints)
    assert (index["latest"], index["best"], index["best_eval_loss"]) == ("step_000003", "step_000002", 1.0)
    elsewhere = Checkpoints(tmp_path / "other", keep_last=1)
    assert elsewhere.eval_losses(tmp_path / "step_000003") == {2: 1.0, 3: 3.0}
    assert elsewhere.eval_losses(tmp_path / "step_000002") == {2: 1.0}
    checkpoints.save(4, filled(4), {})
    assert 4 not in checkpoints.eval_losses(tmp_path / "step_000004")


def test_latest_and_pruning_follow_the_order_of_saving(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    for step in (100, 200, 300):
        checkpoints.save(step, filled(step), {})
    # A run that was resumed from an older step goes on from what it saves now.
    checkpoints.save(250, filled(250), {})
    assert Checkpoints(tmp_path, keep_last=2).latest().name == "step_000250"
    assert on_disk(checkpoints) == ["step_000250", "step_000300"]


def test_saving_a_step_again_replaces_it(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=3)
    checkpoints.save(1, filled(1), {}, eval_loss=0.1)
    checkpoints.save(2, filled(2), {}, eval_loss=0.2)
    assert index_of(checkpoints)["best"] == "step_000001"
    path = checkpoints.save(1, filled(11), {"again": True})
    assert holds(checkpoints, path, 11) and checkpoints.read_meta(path) == {"again": True}
    assert on_disk(checkpoints) == ["step_000001", "step_000002"]
    index = index_of(checkpoints)
    assert (index["latest"], index["steps"]) == ("step_000001", [2, 1])
    assert index["best"] == "step_000002", "the loss of the replaced weights is forgotten"
    checkpoints.save(2, filled(22), {}, eval_loss=0.05)
    assert index_of(checkpoints)["best_eval_loss"] == 0.05


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
    "truncated shard": (
        lambda p: os.truncate(shard_of(p), shard_of(p).stat().st_size - 1),
        "safetensors: .* bytes",
    ),
    "flipped shard": (lambda p: flip(shard_of(p), -1), "safetensors: .*checksum"),
    "missing shard": (lambda p: shard_of(p).unlink(), "safetensors: missing"),
    "foreign shard": (lambda p: (p / "x.safetensors").write_bytes(b"?"), "x.safetensors: not in manifest"),
    "missing meta": (lambda p: (p / "meta.json").unlink(), "meta.json: missing"),
    "flipped meta": (lambda p: flip(p / "meta.json", 3), "meta.json: .*checksum"),
    "missing manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json: missing"),
    "garbled manifest": (lambda p: (p / "manifest.json").write_bytes(b"\xff{"), "manifest.json: unreadable"),
    "changed manifest": (change_manifest, "manifest.json: .*checksum"),
    "empty folder": (lambda p: [file.unlink() for file in p.iterdir()], "manifest.json: missing"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_the_previous_checkpoint_offered(tmp_path, kind):
    checkpoints = Checkpoints(tmp_path, keep_last=4)
    for step in (1, 2, 3, 4):
        checkpoints.save(step, filled(step), {"step": step})
    damage, named = DAMAGE[kind]
    damage(tmp_path / "step_000003")
    damage(tmp_path / "step_000002")
    path = checkpoints.folder / "step_000003"
    offered = f"--resume {tmp_path / 'step_000001'}`"
    for use in (checkpoints.verify, lambda path: checkpoints.load(path, empty_like(filled(0)))):
        with pytest.raises(DamagedCheckpoint, match=named) as caught:
            use(path)
        assert str(path) in str(caught.value) and offered in str(caught.value)
    if "manifest" in named or "meta" in named:
        with pytest.raises(DamagedCheckpoint, match=named):
            checkpoints.read_meta(path)
    checkpoints.verify(tmp_path / "step_000004")


def test_a_folder_that_only_looks_published_is_found_out(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    checkpoints.save(1, filled(1), {})
    (tmp_path / "step_000009").mkdir()
    path = checkpoints.latest()
    with pytest.raises(DamagedCheckpoint, match=r"step_000009.*manifest.*--resume .*step_000001"):
        checkpoints.load(path, filled(0))
    # It never counts as one of the newest, and is the first to go.
    checkpoints.save(2, filled(2), {})
    assert on_disk(checkpoints) == ["step_000001", "step_000002"]
    assert checkpoints.latest().name == "step_000002"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"{}", b"[]", b'{"latest": "../x", "steps": [1], "eval_losses": {}}', b"\xff"]
)
def test_an_unreadable_index_is_named_and_made_anew_by_the_next_save(tmp_path, content):
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    for step in (1, 2):
        checkpoints.save(step, filled(step), {})
    flip(shard_of(tmp_path / "step_000002"), -1)
    (tmp_path / "index.json").write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=r"index.json: unreadable.*--resume .*step_000001"):
        checkpoints.latest()
    with pytest.warns(UserWarning, match="index.json: unreadable"):
        checkpoints.save(3, filled(3), {})
    assert checkpoints.latest().name == "step_000003"
    assert on_disk(checkpoints) == ["step_000002", "step_000003"]


def test_an_index_that_names_a_missing_folder_is_found_out(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=3)
    for step in (1, 2):
        checkpoints.save(step, filled(step), {})
    (tmp_path / "step_000002").rename(tmp_path / "moved")
    with pytest.raises(DamagedCheckpoint, match=r"step_000002.*gone.*--resume .*step_000001"):
        checkpoints.latest()
    (tmp_path / "step_000001").rename(tmp_path / "moved too")
    with pytest.raises(DamagedCheckpoint, match=r"no intact one is left"):
        checkpoints.latest()


class Bomb:
    def __reduce__(self):
        return os.mkdir, (str(Path(os.environ["BOMB"])),)


def test_a_planted_pickle_is_never_opened(tmp_path, monkeypatch):
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=2)
    path = checkpoints.save(1, filled(1), {})
    planted = {".metadata", "model.pt", "__0_0.distcp", "meta.pkl"}
    for name in planted:
        (path / name).write_bytes(pickle.dumps(Bomb()))
    opened = []
    watching = True
    sys.addaudithook(
        lambda event, args: opened.append(str(args[0])) if watching and event == "open" else None
    )
    assert holds(checkpoints, path, 1)
    watching = False
    assert str(path / "meta.json") in opened, "the watch works"
    assert not planted & {Path(name).name for name in opened}
    assert not (tmp_path / "exploded").exists()


# --resume


def test_resume_takes_auto_none_and_any_folder_of_a_run(tmp_path, monkeypatch):
    run = tmp_path / "run"
    checkpoints = Checkpoints(run / "checkpoints", keep_last=3)
    assert resolve_resume("auto", checkpoints) is None
    paths = [checkpoints.save(step, filled(step), {}) for step in (1, 2)]
    assert resolve_resume("auto", checkpoints) == paths[1]
    assert resolve_resume("none", checkpoints) is None
    elsewhere = Checkpoints(tmp_path / "other" / "checkpoints", keep_last=3)
    for given, found in [(paths[0], 0), (run, 1), (run / "checkpoints", 1), (f"{paths[0]}/", 0)]:
        assert resolve_resume(str(given), elsewhere) == paths[found]
    monkeypatch.chdir(paths[0])
    assert resolve_resume(".", elsewhere) == paths[0]
    assert resolve_resume("../step_000002", elsewhere) == paths[1]


def test_a_start_that_went_back_in_its_own_folder_goes_on_with_what_came_of_it(tmp_path):
    """A scheduler starts the same command again, with the --resume that was given once."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=2)
    for step in (2, 4, 6):
        checkpoints.save(step, filled(step), {}, eval_loss={2: 2.0, 4: 3.0, 6: 1.0}[step])
    assert index_of(checkpoints)["best"] == "step_000006"
    path = tmp_path / "checkpoints" / "step_000004"
    assert resolve_resume(str(path), checkpoints) == path
    checkpoints.go_back(path)
    assert checkpoints.latest() == path, "what was left is not gone on from after a kill"
    assert resolve_resume(str(path), checkpoints) == path
    assert index_of(checkpoints)["best"] == "step_000004", "what was left is no longer the best either"
    for step in (5, 7, 8):
        checkpoints.save(step, filled(step), {}, eval_loss=1 / step)
    assert not path.exists() and not (tmp_path / "checkpoints" / "step_000006").exists()
    assert resolve_resume(str(path), checkpoints).name == "step_000008"
    older = tmp_path / "checkpoints" / "step_000007"
    assert resolve_resume(str(older), checkpoints) == older
    checkpoints.forget_evaluations()
    assert index_of(checkpoints)["best"] is None


@pytest.mark.parametrize("went_back", [False, True])
@pytest.mark.parametrize("damage", ["gone", "truncated", "index"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_step_that_an_error_names_is_the_way_out(tmp_path, damage, went_back):
    checkpoints = Checkpoints(tmp_path, keep_last=3)
    path = checkpoints.save(2, filled(2), {})
    if went_back:
        checkpoints.go_back(path)
    latest = checkpoints.save(4, filled(4), {})
    if damage == "gone":
        shutil.rmtree(latest)
    elif damage == "truncated":
        (latest / "meta.json").write_text("")
    else:
        (tmp_path / "index.json").write_text("{")
        path = latest
    assert resolve_resume(str(path), checkpoints) == path


@pytest.mark.parametrize("damage", ["latest", "index"])
def test_a_command_that_went_back_does_not_do_so_again_because_the_latest_is_damaged(tmp_path, damage):
    """What it saved since, and is intact, would be pruned."""
    checkpoints = Checkpoints(tmp_path, keep_last=9)
    path = checkpoints.save(4, filled(4), {})
    checkpoints.go_back(path)
    saved = [checkpoints.save(step, filled(step), {}) for step in (8, 12)]
    if damage == "index":
        (tmp_path / "index.json").write_text("{")
    else:
        (saved.pop() / "meta.json").write_text("")
    with pytest.raises(DamagedCheckpoint, match=f"intact: `--resume {saved[-1]}`"):
        resolve_resume(str(path), checkpoints)


def test_a_pruned_step_that_was_gone_back_to_leaves_its_damaged_successor_to_be_told(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    path = checkpoints.save(2, filled(2), {})
    checkpoints.go_back(path)
    (checkpoints.save(4, filled(4), {}) / "meta.json").write_text("")
    with pytest.raises(DamagedCheckpoint, match="step_000004"):
        resolve_resume(str(path), checkpoints)


def test_going_back_to_a_copy_beside_it_is_going_back_to_the_step(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=3)
    for step in (2, 4):
        checkpoints.save(step, filled(step), {})
    shutil.copytree(tmp_path / "step_000002", tmp_path / "good_one")
    assert resolve_resume(str(tmp_path / "good_one"), checkpoints) == tmp_path / "good_one"
    checkpoints.go_back(tmp_path / "good_one")
    assert checkpoints.latest().name == "step_000002"


def test_a_lower_keep_last_makes_room_before_the_next_save(tmp_path):
    for step in (1, 2, 3):
        Checkpoints(tmp_path, keep_last=3).save(step, filled(step), {})
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    with pytest.raises(UserError, match="cannot write this checkpoint") as caught, disk_that_takes(450):
        checkpoints.save(4, filled(4), {})
    assert on_disk(checkpoints) == ["step_000003"] and "--keep_last" not in str(caught.value)
    assert holds(checkpoints, checkpoints.latest(), 3)


def test_shards_may_be_read_by_whoever_may_read_the_rest(tmp_path):
    path = Checkpoints(tmp_path, keep_last=1).save(1, filled(1), {})
    modes = {file.stat().st_mode for file in path.iterdir()}
    assert len(list(path.glob("*.safetensors"))) > 0 and len(modes) == 1


def test_going_back_in_another_folder_is_not_noted(tmp_path):
    other = Checkpoints(tmp_path / "other", keep_last=2)
    path = other.save(2, filled(2), {})
    checkpoints = Checkpoints(tmp_path / "own", keep_last=2)
    checkpoints.go_back(path)
    assert checkpoints.latest() is None and index_of(other)["went_back"] is None


@pytest.mark.parametrize("resume", ["latest", "missing/step_000001", "empty", "file", ""])
def test_resume_from_where_nothing_is_names_the_flag(tmp_path, monkeypatch, resume):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=f"--resume {resume}: no checkpoint there"):
        resolve_resume(resume, Checkpoints(tmp_path / "checkpoints", keep_last=1))


# Crashes and full disks


@contextmanager
def disk_that_takes(num_bytes: int):
    """Files of this process cannot grow beyond `num_bytes`: a real write error, EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_bytes", [0, 30, 450], ids=["meta", "tensors", "manifest"])
def test_a_write_error_loses_nothing_and_says_so(tmp_path, num_bytes):
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    with pytest.raises(UserError, match="no earlier one"), disk_that_takes(0):
        checkpoints.save(1, filled(1), {})
    checkpoints.save(1, filled(1), {})
    for step in (1, 2):  # saved again, and new
        with (
            pytest.raises(UserError, match=os.strerror(errno.EFBIG)) as caught,
            disk_that_takes(num_bytes),
        ):
            checkpoints.save(step, filled(7), {})
        assert f"step_{step:06d}" in str(caught.value) and "--resume" in str(caught.value)
        assert str(tmp_path / "step_000001") in str(caught.value)
        assert on_disk(checkpoints) == ["step_000001"]
        assert holds(checkpoints, checkpoints.latest(), 1)
    checkpoints.save(2, filled(2), {})
    assert holds(checkpoints, checkpoints.latest(), 2)


def test_a_save_puts_an_interrupted_replacement_right_first(tmp_path):
    Checkpoints(tmp_path, keep_last=2).save(1, filled(1), {})
    (tmp_path / "step_000001").rename(tmp_path / ".step_000001.replaced")
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    checkpoints.save(2, filled(2), {})
    assert on_disk(checkpoints) == ["step_000001", "step_000002"]
    assert holds(checkpoints, tmp_path / "step_000001", 1)


def test_a_publish_that_fails_leaves_what_was_there(tmp_path):
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "file").write_text("kept")
    with pytest.raises(FileNotFoundError):
        publish(tmp_path / "not written", tmp_path / "final")
    assert (tmp_path / "final" / "file").read_text() == "kept"


def test_a_file_is_on_disk_before_it_takes_the_old_one_s_place(tmp_path, monkeypatch):
    order, replace = [], os.replace
    monkeypatch.setattr(durable_files, "sync_to_disk", lambda path: order.append(path.name))
    monkeypatch.setattr(os, "replace", lambda *paths: (order.append("replace"), replace(*paths)))
    replace_file(tmp_path / "file", b"new")
    assert order == [".file.partial", "replace", tmp_path.name]
    assert (tmp_path / "file").read_bytes() == b"new"


def die_at(count: int) -> None:
    """SIGKILL this process just before its `count`-th change on disk."""
    left = count

    def watch(event: str, args: tuple) -> None:
        nonlocal left
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if (writes or event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir")) and left > 0:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def save_and_die(folder: Path, step: int, count: int) -> None:
    die_at(count)
    Checkpoints(folder, keep_last=1).save(step, filled(5), {})


@pytest.mark.parametrize("step", [2, 1], ids=["new step", "same step again"])
def test_a_kill_before_any_single_change_leaves_a_whole_checkpoint(tmp_path, step):
    kills = 0
    for count in range(1, 60):
        folder = tmp_path / str(count)
        Checkpoints(folder, keep_last=1).save(1, filled(1), {})
        child = start(save_and_die, folder, step, count)
        child.join(60)
        survivor = Checkpoints(folder, keep_last=1)
        path = survivor.latest()
        for published in folder.glob("step_*"):
            survivor.verify(published)
        new = path.name == f"step_{step:06d}" and holds(survivor, path, 5)
        assert new or (path.name == "step_000001" and holds(survivor, path, 1))
        survivor.save(3, filled(3), {})
        assert holds(survivor, survivor.latest(), 3)
        assert on_disk(survivor) == ["step_000003"], "leftovers are gone"
        if child.exitcode == 0:
            assert new
            break
        assert child.exitcode == -signal.SIGKILL
        kills += 1
    assert 10 < kills < 59


def save_on_and_on(folder: Path) -> None:
    checkpoints = Checkpoints(folder, keep_last=2)
    step = int(checkpoints.latest().name[5:])
    while True:
        step += 1
        checkpoints.save(step, filled(step % 128), {"step": step}, eval_loss=1 / step)


def test_kills_at_random_moments(tmp_path):
    rounds = random.Random(7)
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    checkpoints.save(1, filled(1), {})
    for _ in range(5):
        before = checkpoints.latest()
        child = start(save_on_and_on, tmp_path)
        while checkpoints.latest() == before:
            assert child.is_alive()
            time.sleep(0.01)
        time.sleep(rounds.uniform(0, 0.3))
        child.kill()
        child.join()
        path = checkpoints.latest()
        step = int(path.name[5:])
        checkpoints.verify(path)
        assert holds(checkpoints, path, step % 128) and checkpoints.read_meta(path) == {"step": step}


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


LAYOUT = {"columns": Shard(1), "replicated": Replicate()}


def distributed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plain = ("plain", "0-d")

    def spread(key: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.float8_e4m3fn:  # scatter knows no float8
            bits = distribute_tensor(tensor.view(torch.uint8), mesh, [Shard(0)])
            local = bits.to_local().view(tensor.dtype)
            shape, stride = tensor.shape, tensor.stride()
            return type(bits).from_local(local, mesh, [Shard(0)], shape=shape, stride=stride)
        return distribute_tensor(tensor, mesh, [LAYOUT.get(key, Shard(0))])

    return {key: t if key in plain else spread(key, t) for key, t in tensors.items()}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def save_distributed(rank: int, folder: Path) -> None:
    checkpoints = Checkpoints(folder / "checkpoints", keep_last=1)
    own = {f"rng.{rank}": torch.full((3,), rank)}
    for step in (1, 2):
        checkpoints.save(step, distributed(full_tensors()) | own, {"rank": rank}, eval_loss=rank - step)


def load_distributed(rank: int, folder: Path) -> None:
    checkpoints = Checkpoints(folder / "checkpoints", keep_last=1)
    path = checkpoints.latest()
    expected = distributed(full_tensors())
    target = distributed(empty_like(full_tensors()))
    before = dict(target)
    checkpoints.load(path, target)
    for key, tensor in expected.items():
        assert target[key] is before[key]
        assert raw_bytes(local(target[key])) == raw_bytes(local(tensor)), key


def test_two_ranks_to_one_and_to_three(tmp_path):
    run_ranks(save_distributed, tmp_path)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=1)
    assert on_disk(checkpoints) == ["step_000002"], "rank 0 pruned"
    path = checkpoints.latest()
    expected = full_tensors() | {"rng.0": torch.full((3,), 0), "rng.1": torch.full((3,), 1)}
    assert checkpoints.shapes(path).keys() == expected.keys()
    target = empty_like(expected)
    assert checkpoints.load(path, target) == {"rank": 0}
    for key, tensor in expected.items():
        assert raw_bytes(target[key]) == raw_bytes(tensor), key
    run_ranks(load_distributed, tmp_path, world_size=3)


def test_one_rank_to_two(tmp_path):
    Checkpoints(tmp_path / "checkpoints", keep_last=1).save(1, full_tensors(), {})
    run_ranks(load_distributed, tmp_path)


def small_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))


def trained_fsdp_state(seed: int) -> dict[str, torch.Tensor]:
    model = fully_shard(small_model(seed), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        state |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return state


def fsdp_round_trip(rank: int, folder: Path) -> None:
    checkpoints = Checkpoints(folder / "checkpoints", keep_last=1)
    saved, other = trained_fsdp_state(0), trained_fsdp_state(1)
    assert not torch.equal(local(saved["model.0.weight"]), local(other["model.0.weight"]))
    path = checkpoints.save(1, saved, {})
    checkpoints.load(path, other)
    for key, tensor in saved.items():
        assert torch.equal(local(other[key]), local(tensor)), key
    full = {key: t.full_tensor() if hasattr(t, "full_tensor") else t for key, t in saved.items()}
    if rank == 0:
        save_file(full, folder / "full.safetensors")


def test_fsdp_model_and_optimizer(tmp_path):
    run_ranks(fsdp_round_trip, tmp_path)
    full = load_file(tmp_path / "full.safetensors")
    target, checkpoints = empty_like(full), Checkpoints(tmp_path / "checkpoints", keep_last=1)
    checkpoints.load(checkpoints.latest(), target)
    assert all(torch.equal(target[key], full[key]) for key in full)
    assert "optimizer.0.weight.exp_avg" in full and target["model.0.weight"].shape == (5, 3)


def errors_on_one_rank(rank: int, folder: Path) -> None:
    checkpoints = Checkpoints(folder / "checkpoints", keep_last=1)
    path = checkpoints.save(1, distributed(full_tensors()), {})

    def refused(error, match, work):
        with pytest.raises(error, match=match):
            work()

    # Each of these goes wrong on rank 1 alone, and every rank must hear of it.
    limit = disk_that_takes(200) if rank == 1 else disk_that_takes(2**40)
    with limit:
        tensors = distributed(full_tensors()) | {f"big.{rank}": torch.zeros(100)}
        refused(UserError, "step_000002.*too large.*step_000001", lambda: checkpoints.save(2, tensors, {}))
    unfit = {"x": torch.zeros(2, dtype=torch.complex128 if rank else torch.float32)}
    refused(UserError, "complex128", lambda: checkpoints.save(2, unfit, {}))
    unequal = {"x": torch.zeros(2 + rank)}
    refused(AssertionError, "'x' is .* on one rank", lambda: checkpoints.save(2, unequal, {}))
    missing = {"x": torch.zeros(2)} if rank else {}
    refused(UserError, "'x' is not in the checkpoint", lambda: checkpoints.load(path, missing))
    dist.barrier()
    assert on_disk(checkpoints) == ["step_000001"]
    for name in sorted(path.glob("*.safetensors")):
        if rank == 0:
            flip(name, -1)
        dist.barrier()
        refused(DamagedCheckpoint, name.name, lambda: checkpoints.load(path, distributed(full_tensors())))
        dist.barrier()
        if rank == 0:
            flip(name, -1)
        dist.barrier()
    checkpoints.load(path, distributed(full_tensors()))


def test_an_error_on_one_rank_reaches_all(tmp_path):
    run_ranks(errors_on_one_rank, tmp_path)


def test_one_process_saves_and_loads_without_a_warning(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert holds(checkpoints, checkpoints.save(1, filled(1), {}), 1)
