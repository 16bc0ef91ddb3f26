"""The folder of a run: whole files or none, and an old run is moved aside, never deleted."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from towers.errors import InputError, RunError


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


def write_text(path: Path, text: str) -> None:
    """Write a file so that a crash leaves the old one or the new one, whole; RunError if not."""
    try:
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from None


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, as `write_text` does."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds, {} if it is absent, not whole, or no object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


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

        Raises:
            InputError: another process trains there; the line begins with the flag.
        """
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


def check_train_dir(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that cannot be, or should not become, that of a run.

    Raises:
        InputError: one line.
    """
    try:
        existing = next(p for p in [folder, *folder.absolute().parents] if p.exists())
        if not existing.is_dir():
            raise InputError(f"--train_dir={folder}: {existing} is a file; name a folder")
        moved = overwrite and existing == folder and any(folder.iterdir())
    except OSError as error:
        raise InputError(f"--train_dir={folder}: {error.strerror}") from None
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
    written = folder.absolute().parent if moved else existing
    if not os.access(written, os.W_OK | os.X_OK):
        raise InputError(f"--train_dir={folder}: no permission to write in {written}")


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
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    try:
        folder.rename(aside)
    except OSError as error:
        reason = f"{folder} cannot be moved to {aside}: {error.strerror}"
        raise InputError(f"--overwrite: {reason}") from None
    return aside
