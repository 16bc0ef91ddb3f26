"""The folder of a run: what is written whole, refused or moved aside."""

import errno
import os
from pathlib import Path

import pytest

from tests import runs
from towers import files
from towers.errors import InputError, RunError

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("folder")]


def make_run(path, text="--seed=1\n"):
    path.mkdir(parents=True)
    (path / "flags.cfg").write_text(text)
    return path


def refusal(path, overwrite=False):
    return runs.refusal(files.check_train_dir, Path(path), overwrite)


# Whole files


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_files_are_whole_while_others_are_written_over_them_or_fail_to_be(folder, monkeypatch):
    path = folder / "a.txt"
    for text in ("one\n", "Größe 二\n"):
        files.write_text(path, text)
        assert path.read_text(encoding="utf-8") == text
    with files.replacing(path) as temporary:
        temporary.write_text("old")
        assert path.read_text(encoding="utf-8") == "Größe 二\n"
    assert path.read_text() == "old" and list(folder.iterdir()) == [path]
    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(RunError, match=f"{path} cannot be written: No space left on device"):
        files.write_text(path, "new")
    with pytest.raises(UnicodeEncodeError):
        files.write_text(path, "no text: \udcff")
    assert path.read_text() == "old"
    assert list(folder.iterdir()) == [path]


def test_json(folder, capsys):
    path = folder / "a.json"
    files.write_json(path, {"a": [1, 2.5, None]})
    assert files.read_json(path, {}) == {"a": [1, 2.5, None]}
    schema = {"a": [float | int | None], "b": {"c": str}, str: [(int, str)]}
    path.write_text('{"a": [], "b": {"c": "", "d": 1}, "e": [[1, "\\ud800"]], "e": [[2, "x"]]}')
    assert files.read_json(path, schema)["e"] == [[2, "x"]]
    missing = folder / "missing.json", path / "under a file"
    assert [files.read_json(each, schema) for each in missing] == [{}, {}]
    assert capsys.readouterr().err == ""
    deep = "[" * 100_000, '{"a":' * 100_000, f"[{'9' * 5000}]", '{"a": [1%s]}' % ("0" * 400)
    no_text = b"", b"\xff", b"\0" * 9, b"{}", b"null", b"[1]", b'{"a": 1', b'{"b": null}'
    typed = '{"a": ["1"], "b": {"c": ""}}', '{"b": {"c": ""}, "e": [[1]]}', '{"b": {"c": 1}}'
    for content in (*no_text, *map(str.encode, (*deep, *typed))):
        path.write_bytes(content)
        assert files.read_json(path, schema) == {}, content
        assert capsys.readouterr().err == f"warning     {path} is damaged and is ignored\n"
        with pytest.raises(InputError, match=f"{path} is damaged; replace it"):
            files.read_json(path, schema, needed=True)
    path.unlink()
    for make in path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to(path):
        make()
        assert files.read_json(path, schema) == {} and "is damaged" in capsys.readouterr().err
        path.rmdir() if path.is_dir() else path.unlink()


# Runs


def test_a_run_is_moved_to_the_first_free_number_or_cannot_be(folder, monkeypatch):
    for number in (1, 2):
        make_run(folder / "runs" / "a", str(number))
        assert files.move_aside(Path("runs/a")) == Path(f"runs/a.{number}")
        assert Path(f"runs/a.{number}/flags.cfg").read_text() == str(number)
    Path("runs/a.2").rename("runs/kept")
    make_run(folder / "runs" / "a")
    assert files.move_aside(folder / "runs" / "a/") == folder / "runs" / "a.2"

    Path("thesis").mkdir()  # what is no run is not moved
    assert files.move_aside(Path("thesis")) is None and Path("thesis").is_dir()
    assert files.move_aside(Path("missing")) is None
    make_run(folder / "a")
    monkeypatch.setattr(Path, "rename", no_space)
    said = runs.refusal(files.move_aside, Path("a"))
    assert said.startswith("--overwrite: a cannot be moved to a.1: No space")


# Refusals


@pytest.fixture
def things(folder):
    """Let there be good folders and others."""
    (folder / "empty").mkdir()
    make_run(folder / "a run")
    (folder / "thesis").mkdir()
    (folder / "thesis/chapter 1.tex").touch()
    (folder / "notes.txt").touch()
    links = {"link": "a run", "gone": "missing", "itself": "itself", "far": "a/b/missing"}
    for name, target in links.items():
        (folder / name).symlink_to(target)
    return folder


def test_good_folders(things):
    before = sorted(things.rglob("*"))
    for name in "missing", "deep/er/missing", "empty", "a run", "link":
        for overwrite in (False, True):
            files.check_train_dir(Path(name), overwrite)
            files.check_train_dir(things / name, overwrite)
    files.check_train_dir(Path("thesis"), overwrite=False)
    assert sorted(things.rglob("*")) == before


@pytest.mark.parametrize(
    "name, overwrite, says",
    [
        *((name, overwrite, f"--train_dir={name}: ")
          for name in ("notes.txt", "notes.txt/a/b", "gone", "gone/run", "itself", "far")
          for overwrite in (False, True)),
        ("thesis", True, "--overwrite: thesis holds files but no run (no flags.cfg)"),
    ],
)  # fmt: skip
def test_what_can_be_no_folder_of_a_run(things, name, overwrite, says):
    said = refusal(name, overwrite)
    assert says in said and said.endswith("name another --train_dir")
