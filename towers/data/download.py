"""Fetch an archive over the network and unpack it, completely or not at all."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile

from towers.errors import InputError

_TIMEOUT_SECONDS = 30  # without a byte


def fetch(url: str, md5: str, folder: str) -> None:
    """Download an archive and move the folder in it that is called as `folder` to its place.

    Everything happens in a hidden temporary folder beside `folder`, which is removed whatever
    happens; `folder` appears in one move, when it is complete.

    Raises:
        InputError: the server cannot be reached or stops sending, the sum differs, or `folder`
            cannot be written.
    """
    import keras

    parent, name = os.path.split(os.path.abspath(folder))
    timeout = socket.getdefaulttimeout()
    try:
        os.makedirs(parent, exist_ok=True)
        socket.setdefaulttimeout(_TIMEOUT_SECONDS)
        with (
            tempfile.TemporaryDirectory(dir=parent, prefix=".towers-") as temporary,
            contextlib.redirect_stdout(sys.stderr),  # where the JSON of --json is not
        ):
            unpacked = keras.utils.get_file(
                "archive",
                url,
                cache_dir=temporary,
                cache_subdir="",
                file_hash=md5,
                hash_algorithm="md5",
                extract=True,
            )
            if not os.path.isdir(folder):  # another process may have brought it meanwhile
                os.replace(os.path.join(unpacked, name), folder)
    except Exception as error:  # Keras raises many kinds, the plain Exception among them
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"cannot download {url} to {folder}: {reason}") from None
    finally:
        socket.setdefaulttimeout(timeout)
