"""Whether a zip file or an array can be read in the memory that there is, before any is taken.

A zip file of a megabyte can unpack to terabytes, and numpy makes room for whatever shape a header
names.
"""

import math
import zipfile
from pathlib import Path
from typing import IO

from numpy.lib import format as npy

from towers.devices import memory
from towers.errors import InputError

REMEDY = "write it by np.savez, of arrays of numbers, booleans or texts"
_READ_HEADER = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
# Weights hardly get smaller, but the zeros that an optimizer begins with do.
_LARGER, _SMALL_BYTES = 8, 2**26


def read(path: Path, name: str) -> bytes:
    """Return a file out of an archive.

    Raises:
        ValueError: it unpacks to far more than the archive is, so that nothing is unpacked.
        Exception: of many kinds: there is none, or it is damaged or encrypted.
    """
    with zipfile.ZipFile(path) as archive:
        member = _unpackable(archive.getinfo(name))
        most = _LARGER * path.stat().st_size + _SMALL_BYTES
        if member.file_size > most:
            raise ValueError(
                f"{name} unpacks to {memory.in_words(member.file_size)}, and "
                f"{memory.in_words(most)} are allowed for a file of its size"
            )
        return archive.read(member)


def _unpackable(member: zipfile.ZipInfo) -> zipfile.ZipInfo:
    """Return what unpacks to no more bytes than it says; a BadZipFile for all else."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise zipfile.BadZipFile(f"{member.filename} is packed in a way that is not read")
    return member


def check(file: IO[bytes], named: str) -> None:
    """Look at the headers of all arrays in a file; it is left at its beginning.

    Args:
        file: which is open.
        named: what messages call it, such as --dataset=mine.npz.

    Raises:
        InputError: it has arrays of objects, or more than the machine's memory holds.
        Exception: of many kinds: it is no such file, or damaged.
    """
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        for member in members:
            with archive.open(_unpackable(member)) as content:
                check_header(content, member.file_size, named)
    size, most = sum(member.file_size for member in members), memory.of_host()
    if size > most:
        raise InputError(
            f"{named} unpacks to {memory.in_words(size)}, and there are {memory.in_words(most)} of "
            "memory: read it in parts, in a function of your own, --dataset=my_data:load"
        )
    file.seek(0)


def check_header(content: IO[bytes], size: int, named: str) -> None:
    """Refuse an array, in a file of `size` bytes, whose header is not what numpy writes of numbers.

    Raises:
        InputError: it is an array of objects, which `named` has.
        Exception: of many kinds: it is damaged, or names more or fewer bytes than follow it.
    """
    if content.read(len(npy.MAGIC_PREFIX)) != npy.MAGIC_PREFIX:
        return  # no array, and for numpy the bytes that it is
    content.seek(0)
    shape, _, dtype = _READ_HEADER[npy.read_magic(content)](content)
    if dtype.hasobject:
        raise InputError(f"{named} has arrays of objects; {REMEDY}")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != size - content.tell():
        raise EOFError("it is not as long as it says")
