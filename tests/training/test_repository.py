"""The state of git repositories: told if it can be, and never in the way."""

import os
import re
import shutil
import subprocess

import pytest

from towers.training import repository

pytestmark = pytest.mark.skipif(not shutil.which("git"), reason="there is no git")


def git(folder, *arguments):
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=trunk"]
    environ = {n: v for n, v in os.environ.items() if not n.startswith("GIT_")}
    done = subprocess.run(
        ["git", *who, *arguments], cwd=folder, env=environ, check=True, capture_output=True
    )
    return done.stdout.decode().strip()


@pytest.fixture
def folder(tmp_path):
    """A repository of one commit."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "net.py").write_text("one\n")
    (folder / "old name.py").write_text("a long enough text to be known again\n" * 5)
    git(folder, "init")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "first")
    return folder


def fake_git(folder, monkeypatch, script):
    path = folder / "bin" / "git"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")


def test_a_clean_repository(folder):
    (folder / "below").mkdir()
    assert repository.state(folder / "below") == {
        "root": str(folder.resolve()),
        "commit": git(folder, "rev-parse", "HEAD"),
        "branch": "trunk",
        "dirty": False,
        "changed": [],
        "untracked": [],
        "diff": "clean",
    }


def test_what_is_staged_and_taken_back_is_a_change_without_a_difference(folder):
    (folder / "net.py").write_text("two\n")
    git(folder, "add", ".")
    (folder / "net.py").write_text("one\n")
    found = repository.state(folder)
    assert found["changed"] == ["net.py"]
    assert re.fullmatch("[0-9a-f]{64}", found["diff"])


def test_changes_are_listed_and_told_apart(folder):
    git(folder, "mv", "old name.py", "new name.py")
    (folder / "net.py").write_text("two\n")
    (folder / "added\n.py").write_text("")
    first = repository.state(folder)
    assert first["dirty"] and first["untracked"] == ["added\n.py"]
    assert sorted(first["changed"]) == ["net.py", "new name.py"]
    (folder / "net.py").write_text("three\n")
    second = repository.state(folder)
    assert second["changed"] == first["changed"] and second["diff"] != first["diff"]
    assert {len(first["diff"]), len(second["diff"])} == {64}


def test_a_binary_file_that_changes_again_is_another_state(folder):
    (folder / "table.bin").write_bytes(b"\0\1")
    git(folder, "add", ".")
    states = []
    for content in b"\0\2", b"\0\3":
        (folder / "table.bin").write_bytes(content)
        states.append(repository.state(folder)["diff"])
    assert states[0] != states[1]


def test_the_runs_own_folder_makes_nothing_dirty(folder, monkeypatch):
    run = folder / "runs" / "one"
    run.mkdir(parents=True)
    (run / "flags.cfg").write_text("")
    assert repository.state(folder)["untracked"] == ["runs/"]
    assert repository.state(folder, without=run)["dirty"] is False
    monkeypatch.chdir(folder)
    assert repository.state(folder, without=run.relative_to(folder))["dirty"] is False
    (folder / "runs.py").write_text("")
    assert repository.state(folder, without=run)["untracked"] == ["runs.py"]


def test_many_files_are_counted(folder):
    for number in range(repository._MAX_NAMES + 7):
        (folder / f"{number}.txt").write_text("")
    untracked = repository.state(folder)["untracked"]
    assert len(untracked) == repository._MAX_NAMES + 1 and untracked[-1] == "and 7 more"


def test_without_branch_or_commit(folder, tmp_path):
    git(folder, "checkout", "--detach")
    assert repository.state(folder)["branch"] is None
    assert repository.state(folder)["commit"] == git(folder, "rev-parse", "HEAD")
    empty = tmp_path / "empty"
    empty.mkdir()
    git(empty, "init")
    (empty / "a.py").write_text("")
    git(empty, "add", "a.py")
    state = repository.state(empty)
    assert state["commit"] is None and state["changed"] == ["a.py"] and state["diff"] is None


def test_no_repository_no_folder_no_git(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert repository.state(tmp_path) is None and repository.root(tmp_path) is None
    assert repository.state(tmp_path / "absent") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert repository.state(folder) is None


def test_a_git_that_fails_or_hangs_is_left_alone(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(repository, "_SECONDS", 0.2)
    fake_git(tmp_path, monkeypatch, "tail -f /dev/null")
    assert repository.state(folder) is None
    (tmp_path / "bin" / "git").write_text("#!/bin/sh\necho rubbish; exit 128\n")
    assert repository.state(folder) is None


def test_gits_own_variables_do_not_lead_elsewhere(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert repository.root(folder) == str(folder.resolve())


def test_nothing_is_written(folder):
    os.utime(folder / "net.py", (1, 1))  # git would note that in its index
    before = (folder / ".git" / "index").read_bytes()
    assert not repository.state(folder)["dirty"]
    assert (folder / ".git" / "index").read_bytes() == before
