"""Files of a run: written atomically, locked, and moved aside instead of deleted."""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from towers.errors import InputError, RunError
from towers.formatting import print_line

_NO_FLUSH = errno.EINVAL, errno.ENOTSUP, errno.ENOSYS  # the file system has no fsync


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which replaces `path` atomically after the block."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def flush(path: str | Path) -> None:
    """Flush a file, or a folder's entries, to disk, if the file system supports it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FLUSH:
            raise
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically and durably, as UTF-8; raise RunError if that fails.

    Args:
        path: of the file, which is replaced.
        text: the whole content.
    """
    try:
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
            flush(temporary)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from None


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file like `write_text`."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def update_json(path: Path, **values: Any) -> None:
    """Set values in the object of a JSON file, which may be absent."""
    write_json(path, read_json(path, {}) | values)


def read_json(path: Path, schema: Any, needed: bool = False) -> dict[str, Any]:
    """Return the object in a JSON file, {} if it is absent or, with a warning, damaged.

    Args:
        path: of the file.
        schema: of the object, see `parse_json`.
        needed: whether a damaged file is an error, since results would be others without it.

    Raises:
        InputError: it is damaged, and needed.
    """
    try:
        if stat.S_ISREG(path.stat().st_mode):  # a pipe would block
            return parse_json(path.read_bytes(), schema)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError):
        pass
    if needed:
        raise InputError(f"{path} is damaged; replace it with an intact copy, or remove it")
    warn_damaged(path)
    return {}


def parse_json(text: str | bytes, schema: Any) -> Any:
    """Return the value of a JSON text, whose integers have 64 bits.

    Args:
        text: the whole text.
        schema: what the value must be: {"key": schema} an object, where the key `str` is any other
            one; [schema] a list; (schema, ...) a list of so many items; or a type. A missing key
            counts as null, {} or [].

    Raises:
        ValueError: it is no JSON, or not what the schema says.
    """
    try:
        value = json.loads(text, parse_int=_int64)
    except RecursionError:  # of brackets within brackets
        raise ValueError("too many brackets") from None
    if not _fits(value, schema):
        raise ValueError("a value has the wrong type")
    return value


def _fits(value: Any, schema: Any) -> bool:
    if not isinstance(value, {dict: dict, list: list, tuple: list}.get(type(schema), schema)):
        return False
    if isinstance(schema, dict):
        of_keys = dict.fromkeys(value, schema.get(str, object)) | schema
        of_keys.pop(str, None)
        missing = {key: type(s)() for key, s in of_keys.items() if isinstance(s, dict | list)}
        return all(_fits(value.get(key, missing.get(key)), s) for key, s in of_keys.items())
    if isinstance(schema, list):
        return all(_fits(item, *schema) for item in value)
    if isinstance(schema, tuple):
        return len(value) == len(schema) and all(map(_fits, value, schema))
    return True


def _int64(text: str) -> int:
    if not -(2**63) <= (number := int(text)) < 2**63:
        raise ValueError("a number does not fit in 64 bits")
    return number


def warn_damaged(path: Path) -> None:
    """Print a warning that a file is damaged."""
    print_line(f"warning     {path} is damaged and is ignored", sys.stderr)


# Temporary files of this module and of TensorFlow that a killed process may leave behind.
_LEFT = re.compile(
    r"\.\w[\w.]*\.(cfg|json|tsv|txt)\.\d+|\.(checkpoint|ckpt-\d+)\.\d+(\..*)?"
    r"|ckpt-\d+_temp|ckpt-\d+\..*\.tempstate\d+"
)


def clear_leftovers(folder: Path) -> None:
    """Delete temporary files of dead processes, if possible; the caller holds the lock."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if _LEFT.fullmatch(path.name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


class Lock(contextlib.ExitStack):
    """Locks folders against other processes, within a `with` block."""

    def __init__(self):
        """Hold no lock yet."""
        super().__init__()
        self._held: set[tuple[int, int]] = set()  # (device, inode) of each folder

    def take(self, folder: Path, flag: str = "--train_dir") -> None:
        """Lock a folder, if it exists and the file system has locks.

        Args:
            folder: of the run.
            flag: the one that names the folder.

        Raises:
            InputError: another process trains there.
        """
        if not folder.is_dir():
            return
        descriptor = os.open(folder, os.O_RDONLY)
        self.callback(os.close, descriptor)
        about = os.fstat(descriptor)
        if (inode := (about.st_dev, about.st_ino)) in self._held:  # under another name, perhaps
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{flag}={folder}: another process uses this folder; wait until it ends, or name "
                "another folder"
            ) from None
        except OSError:  # the file system has no locks
            pass
        self._held.add(inode)


def check_train_dir(folder: Path, overwrite: bool, flag: str = "--train_dir") -> None:
    """Check that a run can be written in a folder.

    Args:
        folder: folder of the run, which need not exist.
        overwrite: whether a run that is there is to be moved aside, as by `move_aside`.
        flag: the flag that names the folder, for the error message.

    Raises:
        InputError: it cannot be written, or what is there cannot be moved aside.
    """
    named = f"{flag}={folder}"
    try:
        existing = next(p for p in [folder, *folder.absolute().parents] if os.path.lexists(p))
        moved = overwrite and existing == folder and folder.is_dir() and any(folder.iterdir())
    except OSError as error:
        raise InputError(f"{named}: {error.strerror}") from None
    if not existing.is_dir():  # a file, or a link to nothing
        raise InputError(f"{named}: {existing} is not a folder; name another {flag}")
    if moved and not is_run(folder):
        raise InputError(
            f"--overwrite: {folder} holds files but no run (no flags.cfg), so it is not moved "
            "aside; name another --train_dir"
        )
    where = folder.absolute().parent if moved else existing
    if not os.access(where, os.W_OK | os.X_OK):
        raise InputError(f"{named}: no permission to write to {where}")


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run."""
    return (folder / "flags.cfg").exists() or (folder / "checkpoints").is_dir()


def move_aside(folder: Path) -> Path | None:
    """Rename a run's folder to the first free one of folder.1, folder.2, ...; return that path.

    Raises:
        InputError: it cannot be renamed, as a mounted folder.
    """
    if not is_run(folder):
        return None
    number = 1
    while os.path.lexists(aside := folder.with_name(f"{folder.name}.{number}")):
        number += 1
    try:
        return folder.rename(aside)
    except OSError as error:
        reason = f"{folder} cannot be moved to {aside}: {error.strerror}"
        raise InputError(f"--overwrite: {reason}") from None
