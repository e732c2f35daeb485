"""Checkpoint that --resume starts from: rollbacks, damage and folders of other runs."""

import shutil

import pytest

from core.errors import UserError
from tests.training.checkpoint.test_store import index_of, save_steps
from training.checkpoint.manifest import DamagedCheckpoint
from training.checkpoint.resume import resolve_resume
from training.checkpoint.store import Checkpoints


def test_resume_accepts_auto_none_and_any_folder_of_a_run(tmp_path, monkeypatch):
    run = tmp_path / "run"
    assert resolve_resume("auto", Checkpoints(run / "checkpoints", keep_last=3)) is None
    checkpoints = save_steps(run / "checkpoints", 1, 2)
    paths = [run / "checkpoints" / f"step_00000{step}" for step in (1, 2)]
    assert resolve_resume("auto", checkpoints) == paths[1]
    assert resolve_resume("none", checkpoints) is None
    elsewhere = Checkpoints(tmp_path / "other" / "checkpoints", keep_last=3)
    for given, found in [(paths[0], 0), (run, 1), (run / "checkpoints", 1), (f"{paths[0]}/", 0)]:
        assert resolve_resume(str(given), elsewhere) == paths[found]
    monkeypatch.chdir(paths[0])
    assert resolve_resume(".", elsewhere) == paths[0]
    assert resolve_resume("../step_000002", elsewhere) == paths[1]


@pytest.mark.parametrize("resume", ["latest", "missing/step_000001", "empty", "file", ""])
def test_resume_from_a_path_without_checkpoints_is_refused(tmp_path, monkeypatch, resume):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=f"--resume {resume}: no checkpoint there"):
        resolve_resume(resume, Checkpoints(tmp_path / "checkpoints", keep_last=1))


def test_a_rolled_back_run_resumes_from_what_it_saved_since(tmp_path):
    """A scheduler repeats the same command, with the --resume that was given once."""
    folder = tmp_path / "checkpoints"
    checkpoints = save_steps(folder, 2, 4, 6, keep_last=2, loss2=2.0, loss4=3.0, loss6=1.0)
    path = folder / "step_000004"
    assert resolve_resume(str(path), checkpoints) == path
    checkpoints.go_back(path)
    assert checkpoints.latest() == resolve_resume(str(path), checkpoints) == path
    assert index_of(checkpoints)["best"] == "step_000004", "later steps are no longer the best"
    save_steps(folder, 5, 7, 8, keep_last=2, loss5=0.2, loss7=0.14, loss8=0.12)
    assert not path.exists() and not (folder / "step_000006").exists()
    assert resolve_resume(str(path), checkpoints).name == "step_000008"
    assert resolve_resume(str(folder / "step_000007"), checkpoints).name == "step_000007"
    checkpoints.forget_evaluations()
    assert index_of(checkpoints)["best"] is None


@pytest.mark.parametrize("went_back", [False, True])
@pytest.mark.parametrize("damage", ["gone", "truncated", "index"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_checkpoint_that_an_error_suggests_is_accepted(tmp_path, damage, went_back):
    checkpoints = save_steps(tmp_path, 2, keep_last=3)
    path = tmp_path / "step_000002"
    if went_back:
        checkpoints.go_back(path)
    save_steps(tmp_path, 4, keep_last=3)
    if damage == "gone":
        shutil.rmtree(tmp_path / "step_000004")
    elif damage == "truncated":
        (tmp_path / "step_000004" / "meta.json").write_text("")
    else:
        (tmp_path / "index.json").write_text("{")
        path = tmp_path / "step_000004"
    assert resolve_resume(str(path), checkpoints) == path


@pytest.mark.parametrize(("damage", "intact"), [("latest", 8), ("index", 12), ("pruned", 8)])
def test_a_damaged_latest_checkpoint_does_not_repeat_a_rollback(tmp_path, damage, intact):
    """What the run saved since, and is intact, would be pruned."""
    checkpoints = save_steps(tmp_path, 4)
    path = tmp_path / "step_000004"
    checkpoints.go_back(path)
    save_steps(tmp_path, 8, 12)
    if damage == "pruned":
        shutil.rmtree(path)
    if damage == "index":
        (tmp_path / "index.json").write_text("{")
    else:
        (tmp_path / "step_000012" / "meta.json").write_text("")
    with pytest.raises(DamagedCheckpoint, match=f"intact: `--resume {tmp_path}/step_{intact:06}`"):
        resolve_resume(str(path), checkpoints)


def test_only_a_rollback_in_the_run_s_own_folder_is_recorded(tmp_path):
    other = save_steps(tmp_path / "other", 2)
    own = Checkpoints(tmp_path / "own", keep_last=2)
    own.go_back(tmp_path / "other" / "step_000002")
    assert own.latest() is None and index_of(other)["went_back"] is None
    checkpoints = save_steps(tmp_path / "other", 4)
    copied = shutil.copytree(tmp_path / "other" / "step_000002", tmp_path / "other" / "good_one")
    assert resolve_resume(str(copied), checkpoints) == copied
    checkpoints.go_back(copied)  # recorded as step 2
    assert checkpoints.latest().name == "step_000002"
