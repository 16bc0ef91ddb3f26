"""Checks the sizes in zip archives: a megabyte may unpack to terabytes."""

import zipfile
from pathlib import Path

from towers.devices import memory

# Weights hardly compress, but an optimizer's initial zeros do.
_LARGER, _SMALL_BYTES = 8, 2**26


def sizes(archive: zipfile.ZipFile) -> dict[str, int]:
    """Return {name: bytes when unpacked}; no reader reads more than that.

    Raises:
        zipfile.BadZipFile: a compression may use any amount of memory at once.
    """
    for entry in archive.infolist():
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise zipfile.BadZipFile(f"{entry.filename} is packed in a way that is not read")
    return {entry.filename: entry.file_size for entry in archive.infolist()}


def read(path: Path, name: str) -> bytes:
    """Return the content of a file in an archive.

    Args:
        path: of the archive.
        name: of the file in it.

    Raises:
        ValueError: it would unpack to far more than the size of the archive.
        Exception: of any type: it is missing, damaged or encrypted.
    """
    with zipfile.ZipFile(path) as archive:
        size, most = sizes(archive)[name], _LARGER * path.stat().st_size + _SMALL_BYTES
        if size > most:
            raise ValueError(
                f"{name} unpacks to {memory.in_words(size)}, and {memory.in_words(most)} are "
                "allowed for a file of its size"
            )
        return archive.read(name)
