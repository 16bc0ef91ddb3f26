"""Data sets that their authors published as files: found under a folder, or downloaded, and read.

A module of such data sets has them as `SETS`, by their names. What it knows itself is how to read
a file; a lost byte is seen there, a changed one by the sum that a published file is known to have.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from towers.errors import InputError
from towers.files import check_is_file

if TYPE_CHECKING:
    from towers.data.pipeline import Data


@dataclasses.dataclass(frozen=True)
class Published:
    """A data set of images with one label each."""

    name: str  # as --dataset gives it
    title: str  # as its authors do
    class_names: tuple[str, ...]
    forms: tuple[tuple[str, ...], ...]  # the files of each form, the test set's last
    md5_of: Mapping[str, str]  # {name: sum} of the files as they are published, where it is known
    max_bytes: int  # of a file
    folder: str  # that a download makes
    url: str  # of an archive of that folder
    md5: str  # of the archive
    # From a file's path and bytes to uint8 [N, 32, 32, 3] and int32 [N]. Raises InputError.
    read: Callable[[str, bytes], tuple[np.ndarray, np.ndarray]]
    # In the name of a folder in which some of the files mean the rest is missing. Files of others
    # may have such names as train and test, too.
    sign: str = ""

    def load(self, data_dir: str) -> Data:
        """Read the data set from wherever it lies under `data_dir`; download it if it is nowhere.

        Files that are not those that were published are named in a warning, and taken.

        Raises:
            InputError: a file is damaged or missing from its set, or the download failed.
        """
        from towers.data.pipeline import ArraySplit, Data  # `find` needs no TensorFlow

        if not self.find(data_dir):
            self._download(data_dir)
        paths = self.find(data_dir)
        try:
            images, labels, differing = map(list, zip(*map(self._read, paths), strict=True))
        except InputError as error:
            raise InputError(f"{error}; put an intact copy in its place") from None
        if any(differing):
            print(
                f"warning: {', '.join(filter(None, differing))} in {os.path.dirname(paths[0])} "
                f"differ from the published files of {self.title}, by their md5: accuracies may "
                "not compare",
                file=sys.stderr,
            )
        test = ArraySplit(images.pop(), labels.pop())
        joined = [np.concatenate(images), np.concatenate(labels)]
        del images  # before they are copied once more
        train = ArraySplit(*joined)
        return Data(self.name, train, test, len(self.class_names), self.class_names)

    def find(self, data_dir: str) -> list[str]:
        """Look for the files, the folders nearest to `data_dir` first.

        Returns:
            The paths of the training files and the test file, or nothing.

        Raises:
            InputError: some of the files are there, but no folder has them all.
        """
        incomplete = ""
        for folder, files in _folders(data_dir):
            for names in self.forms:
                missing = [name for name in names if name not in files]
                if not missing:
                    return [os.path.join(folder, name) for name in names]
                named = self.sign in os.path.basename(os.path.realpath(folder)).lower()
                if named and len(missing) < len(names):
                    incomplete = incomplete or f"{folder} lacks {', '.join(missing)}"
        if incomplete:
            raise InputError(
                f"{self.title} in {incomplete}; add what is missing, or move the rest away to have "
                f"{self.title} downloaded"
            )
        return []

    def _read(self, path: str) -> tuple[np.ndarray, np.ndarray, str]:
        """Return images, labels, and the file's name if it is not the published one, else ""."""
        try:
            check_is_file(path)
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                content = file.read(min(size, self.max_bytes) + 1)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        if len(content) > self.max_bytes:
            raise InputError(f"{path} has more than {self.max_bytes:,} bytes")
        images, labels = self.read(path, content)
        name = os.path.basename(path)
        md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
        return images, labels, "" if md5 == self.md5_of.get(name, md5) else name

    def _download(self, data_dir: str) -> None:
        """Fetch the archive; its folder appears in one move, when it is complete."""
        import keras

        folder = os.path.join(data_dir, self.folder)
        try:
            os.makedirs(data_dir, exist_ok=True)
            with (
                tempfile.TemporaryDirectory(dir=data_dir, prefix=".towers-") as temporary,
                contextlib.redirect_stdout(sys.stderr),  # where the JSON of --json is not
            ):
                path = keras.utils.get_file(
                    "archive",
                    self.url,
                    cache_dir=temporary,
                    cache_subdir="",
                    file_hash=self.md5,
                    hash_algorithm="md5",
                    extract=True,
                )
                if not self.find(data_dir):  # another process may have brought it meanwhile
                    os.replace(os.path.join(path, self.folder), folder)
        except Exception as error:  # Keras raises many kinds, the plain Exception among them
            reason = " ".join(str(error).split()) or type(error).__name__
            first, *_, last = self.forms[0]
            between = " ... " if len(self.forms[0]) > 2 else ", "
            raise InputError(
                f"cannot download {self.url} to {folder}: {reason}; put {self.folder} "
                f"({first}{between}{last}) under {data_dir}, or use --dataset=shapes"
            ) from None


def _folders(top: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (folder, the files in it), shallowest first, without hidden folders."""
    waiting, seen = [top], set()
    for folder in waiting:  # which grows meanwhile
        real = os.path.realpath(folder)
        if real in seen:  # a link back up
            continue
        seen.add(real)
        with contextlib.suppress(OSError):
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
            folders = [entry for entry in entries if _is_folder(entry)]
            yield folder, sorted({e.name for e in entries} - {e.name for e in folders})
            waiting += [entry.path for entry in folders if not entry.name.startswith(".")]


def _is_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False
