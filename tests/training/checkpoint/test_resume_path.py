"""Checkpoint that --resume starts from: rollbacks, damage and folders of other runs."""

import json
import shutil

import pytest
from fp8_suite.core.errors import UserError
from fp8_suite.training.checkpoint.resume import forget_evaluations, resolve_resume, roll_back
from fp8_suite.training.checkpoint.store import Checkpoints

from tests.training.checkpoint.test_store import index_of, save_steps


def test_resume_accepts_auto_none_and_any_folder_of_a_run(tmp_path, monkeypatch):
    run = tmp_path / "run"
    assert resolve_resume("auto", Checkpoints(run / "checkpoints", keep_last=3)) is None
    checkpoints = save_steps(run / "checkpoints", 1, 2)
    paths = [run / "checkpoints" / f"step_00000{step}" for step in (1, 2)]
    assert resolve_resume("auto", checkpoints) == paths[1]
    assert resolve_resume("none", checkpoints) is None
    elsewhere = Checkpoints(tmp_path / "other" / "checkpoints", keep_last=3)
    for requested, number in [(paths[0], 0), (run, 1), (run / "checkpoints", 1), (f"{paths[0]}/", 0)]:
        assert resolve_resume(str(requested), elsewhere) == paths[number]
    monkeypatch.chdir(paths[0])
    assert resolve_resume(".", elsewhere) == paths[0]
    assert resolve_resume("../step_000002", elsewhere) == paths[1]


@pytest.mark.parametrize("resume", ["latest", "missing/step_000001", "empty", "file", ""])
def test_resume_from_a_path_without_checkpoints_is_refused(tmp_path, monkeypatch, resume):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    # A missing path is not taken for another run's, though this one has a checkpoint.
    own = save_steps(tmp_path / "checkpoints", *[1] * ("missing" in resume))
    with pytest.raises(UserError, match=f"--resume {resume}: no checkpoint there, or one without manifest"):
        resolve_resume(resume, own)


def test_a_rolled_back_run_resumes_from_what_it_saved_since(tmp_path):
    """A scheduler repeats the same command, with the --resume that was given once."""
    folder = tmp_path / "checkpoints"
    checkpoints = save_steps(folder, 2, 4, 6, keep_last=2, loss2=2.0, loss4=3.0, loss6=1.0)
    path = folder / "step_000004"
    assert resolve_resume(str(path), checkpoints) == path
    roll_back(checkpoints, path)
    assert checkpoints.latest() == resolve_resume(str(path), checkpoints) == path
    assert index_of(checkpoints)["best"] == "step_000004", "later steps are no longer the best"
    save_steps(folder, 5, keep_last=2, loss5=0.2)
    assert path.exists() and resolve_resume(str(path), checkpoints).name == "step_000005"
    save_steps(folder, 7, 8, keep_last=2, loss7=0.14, loss8=0.12)
    assert not path.exists() and not (folder / "step_000006").exists()
    assert resolve_resume(str(path), checkpoints).name == "step_000008"
    assert resolve_resume(str(folder / "step_000007"), checkpoints).name == "step_000007"
    forget_evaluations(checkpoints)
    assert index_of(checkpoints)["best"] is None


def test_only_a_rollback_in_the_run_s_own_folder_is_recorded(tmp_path):
    source = save_steps(tmp_path / "other", 2)
    checkpoints_here = Checkpoints(tmp_path / "own", keep_last=2)
    roll_back(checkpoints_here, tmp_path / "other" / "step_000002")
    assert checkpoints_here.latest() is None and index_of(source)["rolled_back_to"] is None
    checkpoints = save_steps(tmp_path / "other", 4)
    copied = shutil.copytree(tmp_path / "other" / "step_000002", tmp_path / "other" / "good_one")
    assert resolve_resume(str(copied), checkpoints) == copied
    roll_back(checkpoints, copied)  # recorded as step 2
    assert checkpoints.latest().name == "step_000002"


def test_a_run_with_checkpoints_on_another_disk_resumes_with_the_path_it_started_from(tmp_path):
    run, source = tmp_path / "run", tmp_path / "other"
    save_steps(source / "checkpoints", 2)
    saved = save_steps(tmp_path / "disk", 4)
    run.mkdir()
    (run / "checkpoints").symlink_to(saved.folder)
    (run / "settings.json").write_text(json.dumps({"resume": str(source)}))
    checkpoints = Checkpoints(run / "checkpoints", keep_last=3)
    assert resolve_resume(str(source), checkpoints) == run / "checkpoints" / "step_000004"
