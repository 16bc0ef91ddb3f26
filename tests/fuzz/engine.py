"""Trying an input: it ends with a documented code and one line, in time, and runs no code."""

import builtins
import contextlib
import dataclasses
import functools
import io
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from PIL import Image

from tests.data import image_files
from tests.fuzz.inputs import FOLDER, LINK, PIPE, READ_ONLY, Case
from tests.runs import as_trained
from towers import cli
from towers.commands.predict import inputs as predict_inputs
from towers.commands.sweep import command as sweep
from towers.data import cifar, folder
from towers.errors import InputError, RunError
from towers.monitoring import results
from towers.options import flags
from towers.options.run import Options
from towers.training.load import read_weights
from towers.training.run import manifest, prepare_run, result
from towers.training.run.setup import RunContext, load_data, prepare
from towers.training.run.tensorflow_errors import user_facing_errors

CODES = {0, 1, 2, 75, 76, 130, 141}
FEW_RECORDS = 4  # of each file of CIFAR-10
SECONDS = 60.0  # that an input may take
_CANARY = """
import builtins
def sing(*args, **kwargs):
    builtins.canary_songs = getattr(builtins, "canary_songs", 0) + 1
class Bird:
    def __init__(self, *args, **kwargs):
        sing()
sing.imported = sing()
"""


class Hang(BaseException):
    """An input that has taken too long; of no class that anybody catches."""


@dataclasses.dataclass
class Template:
    """What lies in the folder of each input: {path: bytes}, a run among them, and data sets."""

    files: dict[str, bytes]
    argv: tuple[str, ...]
    data = {
        "npz": ("npz/data.npz", ""),
        "folder": ("folder", "folder"),
        "cifar": ("cifar10", "cifar"),
    }


def make_template(folder: Path) -> Template:
    """Train a small run, copy it, and write small data sets; return all of it."""
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, [40, 8, 8, 1], np.uint8), np.arange(40) % 3
    argv = (
        "--model=models.resnet:resnet", "--model_args=depth=8,width=2", "--dataset=train.npz",
        "--augment=standardize", "--batch_size=8", "--max_steps=4", "--log_every_steps=1",
        "--validation_fraction=0.2", "--keep_best", "--devices=cpu", "--ema_decay=0.9",
    )  # fmt: skip
    with _standing_in(folder):
        parts = dict(x_train=images, y_train=labels, x_test=images[:9], y_test=labels[:9])
        np.savez("train.npz", **parts)
        np.save("x.npy", images[:3])
        code, _, err = _call(["train", "--train_dir=run", *argv])
        assert code == 0, err
        for kind in "npz", "folder", "cifar":
            Path(kind).mkdir()
        np.savez("npz/data.npz", **parts)
        for split, numbers in ("train", range(6)), ("test", range(6, 9)):
            image_files.write_folder(Path("folder"), numbers, split=split)
        Path("images").mkdir()
        picture = Image.fromarray(random.integers(0, 256, [9, 7, 3], np.uint8))
        for mode, ending in (
            *(("RGB", e) for e in ("png", "jpg", "bmp", "gif")), ("P", "png"), ("P", "bmp"),
            ("1", "bmp"), ("LA", "png"), ("CMYK", "jpg"), ("RGBA", "png"), ("I;16", "png"),
        ):  # fmt: skip
            made = picture.quantize(8) if mode == "P" else picture.convert(mode)
            more = {"transparency": b"\0\x80"} if (mode, ending) == ("P", "png") else {}
            made.save(f"images/{mode.replace(';', '')}.{ending}", **more)
        for name in cifar.FILES:
            Path("cifar", name).write_bytes(bytes(3073 * FEW_RECORDS))
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    found = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    return Template({name: data for name, data in found.items() if "/.towers" not in name}, argv)


def try_out(kind: str, case: Case, template: Template, folder: Path) -> str:
    """Try an input in an empty folder; return what is wrong about how it ended, "" for nothing."""
    _lay_out(case, template, folder, kind)
    before = vars(builtins).get("canary_songs")
    with _standing_in(folder), _in_time():
        try:
            wrong = _read(*case.read) if case.read else _run(kind, case.argv)
        except Hang:
            wrong = f"hang: longer than {SECONDS:g} s"
    return "code ran: the canary sang" if vars(builtins).get("canary_songs") != before else wrong


def _run(kind: str, argv: tuple[str, ...]) -> str:
    with _verbs_that_do_nothing() if kind in READ_ONLY else contextlib.nullcontext():
        code, out, err = _call(list(argv))
    if "Traceback (most recent call last)" in err + out or not isinstance(code, int):
        return f"traceback: {err[-6000:]}{'' if isinstance(code, int) else code}"
    if code not in CODES:
        return f"exit code {code}: {err[-2000:]}"
    said = [line for line in err.splitlines() if line.startswith("towers: ")]
    if code in (1, 2) and len(said) != 1:
        return f"exit code {code} with {len(said)} lines: {err[-2000:]}"
    return ""


def _read(kind: str, *arguments: str) -> str:
    """Read what a case is about; return what is wrong about how that ended."""
    for part in {"data": _data, "run": _run_files, "image": _image, "array": _array}[kind](
        *arguments
    ):
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                part()
        except (InputError, RunError) as error:
            if "\n" in str(error):
                return f"several lines: {error}"
        except Exception:
            return f"traceback: {traceback.format_exc()[-6000:]}"
    return ""


def _data(name: str, folder: str) -> Iterator[Callable]:
    def read() -> None:
        with mock.patch.object(cifar, "NUM_RECORDS", FEW_RECORDS):
            found = load_data(Options(dataset=name, data_dir=folder))
            with user_facing_errors():
                for split in found.train, found.test:
                    next(iter(split.eval_batches(4)), None)
                next(iter(found.train.train_batches(4, seed=0)), None)

    yield read


def _image(path: str) -> Iterator[Callable]:
    for channels, size in (3, None), (1, (4, 5)), (4, None):
        yield functools.partial(folder.read_image, path, size, channels)


def _array(path: str) -> Iterator[Callable]:
    def read_all(spec: str) -> None:
        (file,) = predict_inputs.find([path], as_trained(None, spec))
        assert file.read(file.size - 1).shape == file.read(0).shape

    if path.endswith(".npz"):
        yield lambda: load_data(Options(dataset=path)).train.checksum()
    for spec in "float32[3]", "string[]", "uint8[8, 8, 1]", "int32[]":
        yield functools.partial(read_all, spec)


@functools.cache
def _context(*argv: str) -> RunContext:
    return prepare(flags.parse(["--train_dir=run", *argv]))


def _run_files(*argv: str) -> Iterator[Callable]:
    run = _context(*argv)

    def restore() -> None:
        restored = prepare_run.restore(run)
        manifest.extended(run, restored.manifest)
        if restored.result:
            result.tell_finished(run, restored, len)

    def compare() -> None:
        entry = {"name": "a", "flags": {"seed": 0}, "status": "finished"}
        sweep.closing_lines(sweep.compare("s", [entry | {"result": results.read("run") or None}]))

    def check() -> None:
        task = manifest.read(Path("run")).get("task", {})
        manifest.check_data(run.data, run.options, task, number=True, trains=True)
        manifest.passed(Path("run"))

    yield from (restore, compare, check, functools.partial(read_weights, Path("run")))


def _call(argv: list[str]) -> tuple[Any, str, str]:
    """Run a command line; return its code, or the traceback of what it raised, and what it said."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code: Any = cli.main(argv)
        except Exception:
            code = traceback.format_exc()
        except SystemExit as end:
            code = f"SystemExit({end.code})"
    return code, out.getvalue(), err.getvalue()


@contextlib.contextmanager
def _verbs_that_do_nothing() -> Iterator[None]:
    ends = f"{__name__}:nothing"
    verbs = {n: dataclasses.replace(verb, function=ends) for n, verb in cli.VERBS.items()}
    with mock.patch.object(cli, "VERBS", verbs), mock.patch.object(cli, "_start"):
        yield


def nothing(*_: Any) -> dict:
    """Stand in for a verb."""
    return {}


@contextlib.contextmanager
def _standing_in(folder: Path) -> Iterator[None]:
    """Let the current folder be another one, and leave the process as it was."""
    before, path = os.getcwd(), list(sys.path)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path
        sys.modules.pop("canary", None)


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    def end(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, SECONDS, 1.0)  # again, should somebody swallow it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _lay_out(case: Case, template: Template, folder: Path, kind: str) -> None:
    """Put into a folder what a case needs of the template, and what is its own."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in filter(_needed(kind, case), template.files):
        _write(folder / name, template.files[name])
    (folder / "canary.py").write_text(_CANARY)
    (folder / "notes.txt").write_text("no run")
    (folder / "dangling").symlink_to("missing")
    (folder / "loop").symlink_to("loop")
    for name, content in case.files.items():
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        if content is not None:
            _write(path, content)


def _needed(kind: str, case: Case) -> Callable[[str], bool]:
    """Return what tells whether a file of the template is read at all."""
    if case.read and case.read[0] in ("image", "array"):
        return lambda name: False
    if case.read and case.read[0] == "data":
        return lambda name: name.startswith(f"{next(iter(case.files)).partition('/')[0]}/")
    if kind in (*READ_ONLY, "foreign_flags"):
        return {"run/flags.cfg", "train.npz"}.__contains__
    return lambda name: name.partition("/")[0] in ("run", "train.npz", "x.npy")


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content[0] == LINK:
        path.symlink_to(content[1])
    else:
        {FOLDER: os.mkdir, PIPE: os.mkfifo}[content[0]](path)
