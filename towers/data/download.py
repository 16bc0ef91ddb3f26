"""Fetch an archive over the network and unpack it, completely or not at all.

The server's archive need not be trusted: its sum is checked, and only plain files of a known name
and size are taken from it.

    download.fetch(url, md5, {"data_batch_1.bin": 30_730_000}, folder="data/cifar-10-batches-bin")
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import shutil
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib

import tqdm

from towers.errors import InputError

_TIMEOUT_SECONDS = 30  # without a byte
_CHUNK_BYTES = 2**18


def fetch(url: str, md5: str, files: dict[str, int], folder: str) -> None:
    """Download a tar archive and move the wanted files from it to `folder`.

    Everything happens in a hidden temporary folder beside `folder`, which is removed whatever
    happens; `folder` appears in one move, when it is complete.

    Args:
        url: of the archive.
        md5: its sum, in hexadecimal digits.
        files: name and size in bytes of each wanted file. The folder that it has in the archive
            does not matter, and all else in the archive is left out.
        folder: where they go. Its parent is created if needed, once the server has answered.

    Raises:
        InputError: the server cannot be reached or stops sending, the sum differs, a file is
            missing from the archive or has another size, or `folder` cannot be written.
    """
    try:
        response = urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS)
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it holds the connection
        raise InputError(f"cannot download {url}: {_reason(error)}") from None
    parent = os.path.dirname(os.path.abspath(folder))
    with response:
        try:
            os.makedirs(parent, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=parent, prefix=".towers-") as temporary:
                archive = os.path.join(temporary, "archive")
                _save(response, url, md5, archive)
                unpacked = os.path.join(temporary, "unpacked")
                os.mkdir(unpacked)
                _unpack(archive, url, files, unpacked)
                _move(unpacked, folder, files)
        except OSError as error:
            raise InputError(f"cannot write {folder}: {_reason(error)}") from None


def _save(response: http.client.HTTPResponse, url: str, md5: str, archive: str) -> None:
    """Write the response to a file and check its sum."""
    total = int(response.headers.get("Content-Length") or 0)
    digest, done = hashlib.md5(usedforsecurity=False), 0
    bar = tqdm.tqdm(
        desc=os.path.basename(url),
        total=total or None,
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        disable=not sys.stderr.isatty(),
    )
    with bar, open(archive, "wb") as file:
        while True:
            try:
                chunk = response.read(_CHUNK_BYTES)
            except (OSError, http.client.HTTPException) as error:
                raise InputError(f"cannot download {url}: {_reason(error)}") from None
            if not chunk:
                break
            file.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            bar.update(len(chunk))
    if done < total:
        raise InputError(
            f"cannot download {url}: the connection ended after {done:,} of {total:,} bytes"
        )
    if digest.hexdigest() != md5:
        raise InputError(
            f"{url} has md5 {digest.hexdigest()}; expected {md5}; nothing of it was kept"
        )


def _unpack(archive: str, url: str, files: dict[str, int], folder: str) -> None:
    """Write the wanted files of the archive into `folder`, under their base names only."""
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = os.path.basename(member.name)
                # Links and devices are left out; no path of the archive's is ever used.
                if not member.isreg() or files.get(name) != member.size:
                    continue
                with open(os.path.join(folder, name), "wb") as file:
                    shutil.copyfileobj(tar.extractfile(member), file)
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{url} is not a whole tar archive: {_reason(error)}") from None
    missing = sorted(files.keys() - set(os.listdir(folder)))
    if missing:
        raise InputError(f"{url} lacks {missing[0]} as a plain file of {files[missing[0]]:,} bytes")


def _move(unpacked: str, folder: str, files: dict[str, int]) -> None:
    try:
        os.replace(unpacked, folder)
    except OSError:
        # Another process may have brought the same files meanwhile.
        if not all(os.path.isfile(os.path.join(folder, name)) for name in files):
            raise


def _reason(error: BaseException) -> str:
    """Say what went wrong in one line."""
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
    return " ".join(str(reason).split()) or type(error).__name__
