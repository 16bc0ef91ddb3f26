"""The sizes in zip archives, checked first: a megabyte may unpack to terabytes."""

import zipfile
from pathlib import Path

from towers.devices import memory

# Weights hardly get smaller, but the zeros that an optimizer begins with do.
_LARGER, _SMALL_BYTES = 8, 2**26


def sizes(archive: zipfile.ZipFile) -> dict[str, int]:
    """Return {name: bytes when unpacked}; no reader takes more of a file than that.

    Raises:
        zipfile.BadZipFile: one is packed in a way that may take any memory at once.
    """
    for member in archive.infolist():
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise zipfile.BadZipFile(f"{member.filename} is packed in a way that is not read")
    return {member.filename: member.file_size for member in archive.infolist()}


def read(path: Path, name: str) -> bytes:
    """Return the content of a file in an archive.

    Raises:
        ValueError: it unpacks to far more than the archive is, so that nothing is unpacked.
        Exception: of many kinds: there is none, or it is damaged or encrypted.
    """
    with zipfile.ZipFile(path) as archive:
        size, most = sizes(archive)[name], _LARGER * path.stat().st_size + _SMALL_BYTES
        if size > most:
            raise ValueError(
                f"{name} unpacks to {memory.in_words(size)}, and {memory.in_words(most)} are "
                "allowed for a file of its size"
            )
        return archive.read(name)
