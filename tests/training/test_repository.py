"""The state of git repositories: told if it can be, and never in the way."""

import os
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


def state(folder, run="elsewhere"):
    return repository.state(folder, folder / run)


def test_a_clean_repository_in_which_nothing_is_written(folder):
    os.utime(folder / "net.py", (1, 1))  # git would note that in its index
    before = (folder / ".git" / "index").read_bytes()
    (folder / "below").mkdir()
    assert state(folder / "below") == {
        "root": str(folder.resolve()),
        "commit": git(folder, "rev-parse", "HEAD"),
        "branch": "trunk",
        "dirty": False,
        "changed": [],
        "untracked": [],
        "diff": "clean",
    }
    assert (folder / ".git" / "index").read_bytes() == before


def test_changes_are_listed_and_told_apart(folder):
    git(folder, "mv", "old name.py", "new name.py")
    (folder / "table.bin").write_bytes(b"\0\1")
    git(folder, "add", ".")
    (folder / "added\n.py").write_text("")
    diffs = set()
    for name, content in ("net.py", b"two"), ("net.py", b"three"), ("table.bin", b"\0\2"):
        (folder / name).write_bytes(content)
        found = state(folder)
        assert found["dirty"] and found["untracked"] == ["added\n.py"]
        names = ["net.py", "new name.py", "old name.py", "table.bin"]
        assert sorted(found["changed"]) == names
        diffs.add(found["diff"])
    assert [len(diff) for diff in diffs] == [64] * 3


def test_the_runs_own_folder_makes_nothing_dirty(folder, monkeypatch):
    run = folder / "runs" / "one"
    run.mkdir(parents=True)
    (run / "flags.cfg").write_text("")
    assert state(folder)["untracked"] == ["runs/"]
    assert state(folder, "runs/one")["dirty"] is False
    monkeypatch.chdir(folder)
    assert repository.state(folder, run.relative_to(folder))["dirty"] is False
    (folder / "runs.py").write_text("")
    assert state(folder, "runs/one")["untracked"] == ["runs.py"]


def test_many_files_are_counted(folder):
    for number in range(repository._MAX_NAMES + 7):
        (folder / f"{number}.txt").write_text("")
    untracked = state(folder)["untracked"]
    assert len(untracked) == repository._MAX_NAMES + 1 and untracked[-1] == "and 7 more"


def test_without_branch_or_commit(folder, tmp_path):
    git(folder, "checkout", "--detach")
    assert state(folder)["branch"] is None
    assert state(folder)["commit"] == git(folder, "rev-parse", "HEAD")
    empty = tmp_path / "empty"
    empty.mkdir()
    git(empty, "init")
    (empty / "a.py").write_text("")
    git(empty, "add", "a.py")
    found = state(empty)
    assert found["commit"] is None and found["changed"] == ["a.py"] and found["diff"] is None


def test_no_repository_no_folder_no_git(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert state(tmp_path) is None and state(tmp_path / "absent") is None
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))  # as in git's hooks
    assert repository.root(folder) == str(folder.resolve())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert state(folder) is None


@pytest.mark.parametrize("script", ["tail -f /dev/null", "echo rubbish; exit 128"])
def test_a_git_that_fails_or_hangs_is_left_alone(folder, tmp_path, monkeypatch, script):
    monkeypatch.setattr(repository, "_SECONDS", 0.2)
    path = tmp_path / "bin" / "git"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    assert state(folder) is None
