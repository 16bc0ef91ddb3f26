"""The folder of a run: whole files or none, and an old run is moved aside, never deleted."""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from towers.errors import InputError, RunError
from towers.text import cut, printable

_NO_FLUSH = errno.EINVAL, errno.ENOTSUP, errno.ENOSYS  # of file systems that have none
_MOST_LEVELS = 400  # of folders within folders: Python makes and lists them recursively
PARTS = "checkpoints", "train", "eval"  # folders in that of a run
TEXTS = "flags.cfg", "manifest.json", "result.json", "best.json"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield where to write what is to take the place of `path`, for all at once or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def check_is_file(path: str | Path) -> None:
    """Raise an OSError for a pipe or a device, which may let its reader wait for ever."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # of a folder each reader says so
        raise OSError(errno.EINVAL, "it is a pipe or a device, and a file is needed", str(path))


def flush(path: str | Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk, as far as that can be told."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FLUSH:
            raise
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a file so that a crash leaves the old one or the new one, whole; RunError if not."""
    try:
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
            flush(temporary)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from None


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, as `write_text` does."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds, {} if it is absent, not whole, or no object.

    Of a file that is there a line says so.
    """
    try:
        check_is_file(path)
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError):  # of brackets within brackets
        pass
    damaged(path)
    return {}


def damaged(path: Path) -> None:
    """Say that a file is not what it should be."""
    line = printable(f"warning     {path} is damaged, and taken as absent")
    print(line, file=sys.stderr, flush=True)


_LONGEST_NAME = 200  # of what a run writes in its folder, in characters; folders in it included
# What a process that was killed may have left of what it was writing: here, and TensorFlow.
_LEFT = re.compile(
    r"\.\w[\w.]*\.(cfg|json|tsv|txt)\.\d+|\.(checkpoint|ckpt-\d+)\.\d+(\..*)?"
    r"|ckpt-\d+_temp|ckpt-\d+\..*\.tempstate\d+"
)


def clear_leftovers(folder: Path) -> None:
    """Delete what dead processes left in a folder, as far as it can be; the caller has its lock."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if _LEFT.fullmatch(path.name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


class Lock:
    """Keeps other processes from working in a folder, for the length of a `with` block."""

    def __enter__(self) -> "Lock":
        """Hold nothing yet."""
        self._held: dict[tuple[int, int], int] = {}  # {(device, inode): descriptor}
        return self

    def __exit__(self, *_: object) -> None:
        """Let go; the end of the process does, too, however it comes."""
        for descriptor in self._held.values():
            os.close(descriptor)

    def take(self, folder: Path, flag: str = "--train_dir") -> None:
        """Lock a folder, if there is one, and its file system has locks.

        Also those in it that a run has, which may be links to those of another run.

        Raises:
            InputError: another process trains there; the line begins with the flag.
        """
        for path in (folder, *(folder / name for name in PARTS)):
            self._take(path, flag)

    def _take(self, folder: Path, flag: str) -> None:
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except OSError:  # whoever makes the folder takes it
            return
        about = os.fstat(descriptor)
        if (about.st_dev, about.st_ino) in self._held:
            return os.close(descriptor)
        self._held[about.st_dev, about.st_ino] = descriptor
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{flag}={folder}: another process trains there; wait for it, or name another "
                "folder"
            ) from None
        except OSError:  # no locks there
            pass

    def name_of(self, place: tuple[int, int] | None) -> str | None:
        """Return what a locked folder is called now, None if it is deleted, or nobody knows."""
        with contextlib.suppress(KeyError, OSError):
            name = os.readlink(f"/proc/self/fd/{self._held[place]}")
            return name if place_of(Path(name)) == place else None
        return None


class Home:
    """The folder of a run that trains.

    What a run needs to go on, and is written at its start alone, is kept here for that.
    """

    def __init__(self, folder: Path, lock: Lock, say: Callable[[str], None] = print):
        """Note what there is; `say` is given a line when it was gone."""
        self.folder, self.say = folder, say
        self._lock, self._place, self._checking = lock, place_of(folder), threading.Lock()
        known = (folder / name for name in ("flags.cfg", "manifest.json", "placement.tsv"))
        self._kept = {path.name: path.read_bytes() for path in known if path.exists()}

    def check(self) -> None:
        """Make sure that the folder is there, and write again what is gone; from any thread.

        Raises:
            OSError: it cannot be written.
            RunError: it was renamed or deleted.
        """
        with self._checking:
            if place_of(self.folder) != self._place:
                moved = self._lock.name_of(self._place)
                raise RunError(f"the folder that was {self.folder} is {moved or 'gone'} now")
            gone = [name for name in self._kept if not (self.folder / name).exists()]
            if gone:
                self._write(self.folder, gone)
                self.say(f"warning     {self.folder}: {', '.join(gone)} was gone: written again")

    def copy_to(self, folder: Path) -> None:
        """Write there, too, what a run needs to go on, but for its checkpoints."""
        self._write(folder, self._kept)

    def _write(self, folder: Path, names: Iterable[str]) -> None:
        for name in names:
            with replacing(folder / name) as temporary:
                temporary.write_bytes(self._kept[name])


def place_of(path: Path) -> tuple[int, int] | None:
    """Return what tells a file or folder from others, whatever its name; None: there is none."""
    try:
        about = os.stat(path)
    except OSError:
        return None
    return about.st_dev, about.st_ino


def check_train_dir(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that cannot be, or should not become, that of a run.

    Raises:
        InputError: one line.
    """
    check_depth(folder, f"--train_dir={folder}")
    try:
        existing = next(p for p in [folder, *folder.absolute().parents] if os.path.lexists(p))
        if not existing.exists():
            raise InputError(
                f"--train_dir={folder}: {existing} is a link to {os.readlink(existing)}, which is "
                "not there; make that folder, or name another"
            )
        if not existing.is_dir():
            raise InputError(f"--train_dir={folder}: {existing} is a file; name a folder")
        moved = overwrite and existing == folder and any(folder.iterdir())
        if not moved:
            _check_parts(folder)
    except OSError as error:
        raise InputError(f"--train_dir={folder}: {error.strerror}") from None
    _check_name(folder.absolute() / ("x" * _LONGEST_NAME), f"--train_dir={folder}")
    if moved and not is_run(folder):
        raise InputError(
            f"--overwrite: {folder} holds files but no run (no flags.cfg), and is not moved aside: "
            "name another --train_dir"
        )
    if moved and Path.cwd().is_relative_to(folder.resolve()):
        raise InputError(
            f"--overwrite: {folder} cannot be moved aside, it holds the current folder: "
            "name another --train_dir"
        )
    if moved:
        _check_name(aside := _aside(folder), f"--overwrite: {folder} cannot be moved to {aside}")
    written = folder.absolute().parent if moved else existing
    if not os.access(written, os.W_OK | os.X_OK):
        raise InputError(f"--train_dir={folder}: no permission to write in {written}")


def check_depth(folder: Path, given: str) -> None:
    """Refuse a folder below so many others that no program can make it; the line says `given`."""
    levels = len(folder.absolute().parts)
    if levels > _MOST_LEVELS:
        raise InputError(
            f"{cut(given, 80)}: {levels} folders within folders; at most {_MOST_LEVELS} are allowed"
        )


def _check_parts(folder: Path) -> None:
    """Refuse a folder in which something else lies where a run is to write."""
    for name in (*PARTS, *TEXTS):
        path, kind = folder / name, "folder" if name in PARTS else "file"
        if os.path.lexists(path) and not (path.is_dir() if name in PARTS else path.is_file()):
            raise InputError(
                f"--train_dir={folder}: {path} is no {kind}, as that of a run is; move it away, or "
                "name another --train_dir"
            )
        if name in PARTS and path.exists() and not os.access(path, os.W_OK | os.X_OK):
            raise InputError(f"--train_dir={folder}: no permission to write in {path}")


def is_run(folder: Path) -> bool:
    """Tell whether a folder is that of a run."""
    return (folder / "flags.cfg").exists() or (folder / "checkpoints").is_dir()


def move_aside(folder: Path) -> Path | None:
    """Rename the folder of a run to the first free of folder.1, folder.2, ...; return that.

    Raises:
        InputError: the system does not let it, as for a mounted folder.
    """
    if not is_run(folder):
        return None
    aside = _aside(folder)
    try:
        folder.rename(aside)
    except OSError as error:
        reason = f"{folder} cannot be moved to {aside}: {error.strerror}"
        raise InputError(f"--overwrite: {reason}") from None
    return aside


def _aside(folder: Path) -> Path:
    """Return the first free of folder.1, folder.2, ..."""
    number = 1
    while os.path.lexists(aside := folder.with_name(f"{folder.name}.{number}")):
        number += 1
    return aside


def _check_name(path: Path, what: str) -> None:
    """Refuse a path that the system does not take; the line begins with `what`."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise InputError(f"{what}: {error.strerror}; name another --train_dir") from None
