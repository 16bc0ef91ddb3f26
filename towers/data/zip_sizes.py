"""Checks the sizes in zip archives: a megabyte may unpack to terabytes."""

import zipfile


def sizes(archive: zipfile.ZipFile) -> dict[str, int]:
    """Return {name: bytes when unpacked}; no reader reads more than that.

    Raises:
        zipfile.BadZipFile: a compression may use any amount of memory at once.
    """
    for entry in archive.infolist():
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise zipfile.BadZipFile(f"{entry.filename} is packed in a way that is not read")
    return {entry.filename: entry.file_size for entry in archive.infolist()}
