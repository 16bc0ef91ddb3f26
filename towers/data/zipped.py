"""Whether an .npz file can be read in the memory that there is, seen before any of it is taken.

A zip file of a megabyte can unpack to terabytes, and numpy makes room for whatever shape a header
names.
"""

import math
import zipfile
from typing import IO

from numpy.lib import format as npy

from towers.devices import memory
from towers.errors import InputError

_READ_HEADER = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def check(file: IO[bytes], named: str) -> None:
    """Look at the headers of all arrays in a file; it is left at its beginning.

    Args:
        file: which is open.
        named: what messages call it, such as --dataset=mine.npz.

    Raises:
        zipfile.BadZipFile, zlib.error, EOFError: it is no such file, or damaged.
        ValueError: numpy would read no array in it.
        InputError: there is more in it than the machine's memory holds.
    """
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        for member in members:
            with archive.open(member) as content:
                _check_header(content, member)
    size, most = sum(member.file_size for member in members), memory.of_host()
    if size > most:
        raise InputError(
            f"{named} unpacks to {memory.in_words(size)}, and there are {memory.in_words(most)} of "
            "memory: read it in parts, in a function of your own, --dataset=my_data:load"
        )
    file.seek(0)


def _check_header(content: IO[bytes], member: zipfile.ZipInfo) -> None:
    """Refuse an array whose header names more or fewer bytes than follow it."""
    if content.read(len(npy.MAGIC_PREFIX)) != npy.MAGIC_PREFIX:
        return  # no array, and for numpy the bytes that it is
    content.seek(0)
    version = npy.read_magic(content)
    if version not in _READ_HEADER:
        return  # of types that are refused for what they are
    shape, _, dtype = _READ_HEADER[version](content)
    if dtype.hasobject:
        raise ValueError("an array of objects")
    if math.prod(shape) * dtype.itemsize != member.file_size - content.tell():
        raise EOFError(f"{member.filename} is not as long as it says")
