"""Hostile inputs: command lines, flagfiles, and the files that towers read, damaged.

Each kind of input is a Hypothesis strategy of `Case`s. A case is what stands in an empty folder
beside what `engine.Template` puts there, and what is done then.
"""

import dataclasses
import io
import struct
import zipfile
from typing import Any

from hypothesis import strategies as st

from towers import cli

LINK, FOLDER = "link", "folder"  # in the place of a file
CANARY = "canary:sing"  # code that an input names, and that must not run


@dataclasses.dataclass(frozen=True)
class Case:
    """An input: {path: what lies there} and what is done.

    There lie bytes, or (LINK, target), (FOLDER,), or None: it is removed. `argv` is a
    command line; `read` is a data set that is loaded in its place, as (name, folder).
    """

    files: dict[str, Any]
    argv: tuple[str, ...] = ()
    read: tuple[str, str] = ()


# ---------------------------------------------------------------------------- Damage


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """Return bytes that were whole once."""
    place = st.integers(0, 2**32).map(lambda n: n % (len(content) + 1))

    def flip(data: bytes, at: int, junk: bytes) -> bytes:
        changed = bytearray(data)
        if at < len(changed):
            changed[at] ^= 1 << len(junk) % 8
        return bytes(changed)

    damages = {
        "flip": flip,
        "cut": lambda data, at, junk: data[:at],
        "insert": lambda data, at, junk: data[:at] + junk + data[at:],
        "overwrite": lambda data, at, junk: data[:at] + junk + data[at + len(junk) :],
        "remove": lambda data, at, junk: data[:at] + data[at + len(junk) :],
        "huge": lambda data, at, junk: data[:at] + struct.pack("<Q", 2**63 - 1) + data[at + 8 :],
        "twice": lambda data, at, junk: data[:at] + data[at // 2 :],
    }
    junk = st.binary(max_size=40)
    steps = st.lists(st.tuples(st.sampled_from(list(damages)), place, junk), min_size=1, max_size=3)

    def apply(steps: list[tuple[str, int, bytes]]) -> bytes:
        data = content
        for name, at, junk in steps:
            data = damages[name](data, at, junk)
        return data

    return st.one_of(steps.map(apply), st.sampled_from([b"", b"\0" * 4096]), st.binary())


def in_place(content: bytes) -> st.SearchStrategy[Any]:
    """Return what may lie in the place of a file."""
    texts = b"[" * 100_000, b'{"a":' * 100_000, b"\xff" * 5000, b'{"step": [], "points": 1e999}'
    others = [None, (LINK, "missing"), (LINK, "."), (FOLDER,), *texts]
    return st.one_of(damaged(content), damaged(content), st.sampled_from(others))


# ---------------------------------------------------------------------------- Command lines

_FLAGS = sorted({name for verb in cli.VERBS.values() for name in verb.fields()} | {"num_gpus"})
_VALUES = st.one_of(
    st.sampled_from(
        [
            "", "0", "-1", "2", "1.5", "nan", "-inf", "1e400", "9" * 400, "true", "no", "a,b", ",",
            "1,2,4", "4,2", "1:2", ":", "a..b:c", ".:x", "builtins:dict", "os:system", CANARY,
            "missing:function", "models.cnn:cnn", "models.cnn:", "x=1", "=", "depth=nan,width=",
            "a=b=c", "run", "run/", ".", "..", "/", "missing", "notes.txt", "dangling", "loop",
            "train.npz", "/dev/null", "~", "~nobody/x", "x" * 300, "a/" * 200, "[x]", "\\", "'",
            "\"", "$(x)", "%s", "{0}", "\u202e", "\ud800", "\x1b[31m", " x ", "a\nb", "shapes",
            "cifar10", "folder", "synthetic", "a.npz,b.npz", "adam", "float64", "mixed_float16",
            "cpu", "/gpu:0", "/cpu:0,/cpu:1", "gpu:-1", "none", "GPU-x", "max:auc", "100:110",
            "64x64", "0x0", "100000x1", "auto", "learning_rate:0.1,0.2", "seed:log(0..1)", "x:1",
        ]
    ),
    st.text(max_size=12),
    st.integers().map(str),
    st.floats().map(str),
)  # fmt: skip


@st.composite
def arguments(draw) -> str:
    """Return one argument of a command line."""
    name = draw(st.sampled_from(_FLAGS) | st.text("abc_-=.", min_size=1, max_size=9))
    value = draw(_VALUES)
    forms = f"--{name}={value}", f"-{name}={value}", f"--{name}", f"--no{name}", value, f"--{value}"
    return draw(st.sampled_from([*forms[:1] * 6, *forms])).replace("\0", "")


VERBS = st.sampled_from([*cli.VERBS] * 4 + ["", "fit", "tran", "--help", "--version", "help", "\n"])


@st.composite
def command_lines(draw, template) -> Case:
    """Return a verb with flags, also of a folder in which things lie that are no runs."""
    argv = [draw(VERBS), *draw(st.lists(arguments(), max_size=5))]
    if draw(st.booleans()):
        argv.append("--train_dir=run")
    return Case({}, tuple(argv))


@st.composite
def flagfiles(draw, template) -> Case:
    """Return a command line whose flagfile is odd: nested, damaged, of text."""
    lines = draw(st.lists(arguments() | _VALUES, max_size=6))
    text = "\n".join(lines).encode(errors="replace")
    kind = draw(st.integers(0, 5))
    files: dict[str, Any] = {"a.cfg": text}
    if kind == 0:
        files["a.cfg"] = text + b"\n--flagfile=a.cfg\n"
    elif kind == 1:
        number = draw(st.sampled_from([1, 2, 3, 50, 50, 50, 1500]))
        files = {f"{n or 'a'}.cfg": f"--flagfile={n + 1}.cfg\n".encode() for n in range(number)}
        files[f"{number}.cfg"] = text
    elif kind == 2:
        files["a.cfg"] = draw(in_place(text or b"--seed=1"))
    elif kind == 3:  # in the place of that of a run
        files = {"run/flags.cfg": draw(in_place(template.files["run/flags.cfg"]) | st.just(text))}
    verb = draw(st.sampled_from([*cli.VERBS]))
    given = ["--train_dir=run"] if kind == 3 else ["--flagfile=a.cfg"]
    if draw(st.integers(0, 4)) == 0:
        given.append("--trust")
    if verb == "predict":
        given.append("run")
    return Case(files, (verb, *given))


@st.composite
def foreign_flags(draw, template) -> Case:
    """Return a run whose flags.cfg names code, with a command line that names none."""
    text = template.files["run/flags.cfg"].decode()
    name = draw(st.sampled_from(["model", "dataset", "loss", "metrics", "optimizer"]))
    named = draw(st.sampled_from([CANARY, f"{CANARY},mae", "canary:Bird", "os:getpid"]))
    line = f"--{name}={named}"
    if draw(st.booleans()):
        lines = [line if one.startswith(f"--{name}=") else one for one in text.splitlines()]
        text = "\n".join(lines)
    else:
        text = f"{text}\n{line}\n"
    verb = draw(st.sampled_from(["train", "evaluate", "predict", "export"]))
    more = ["train.npz"] if verb == "predict" else []
    return Case({"run/flags.cfg": text.encode()}, (verb, "--train_dir=run", *more))


# ---------------------------------------------------------------------------- What lies in a run


@st.composite
def whole_runs(draw, template) -> Case:
    """Return a run in which some files are damaged, and go on with it."""
    of_run = [name for name in template.files if name.startswith("run/")]
    files = {}
    for name in draw(st.lists(st.sampled_from(of_run), min_size=1, max_size=3)):
        files[name] = draw(in_place(template.files[name]))
    if draw(st.integers(0, 3)) == 0:  # of whole folders
        part = draw(st.sampled_from(["train", "eval", "checkpoints"]))
        files |= {name: None for name in of_run if name.startswith(f"run/{part}/")}
        files[f"run/{part}"] = draw(st.sampled_from([b"", b"text", (LINK, "missing"), (LINK, ".")]))
    if draw(st.booleans()):
        files["x.npy"] = draw(_arrays())
    commands = [
        ("train", "--train_dir=run", "--max_steps=6"),
        ("train", "--train_dir=run", "--num_towers=2", "--max_steps=6"),
        ("train", "--train_dir=run"),
        ("train", "--train_dir=run", "--overwrite", *template.argv),
        ("train", "--train_dir=new", "--init_from=run", *template.argv),
        ("evaluate", "--train_dir=run", "--json"),
        ("predict", "--train_dir=run", "x.npy"),
        ("export", "--train_dir=run", "--output=out.keras"),
    ]
    return Case(files, draw(st.sampled_from(commands)))


# ---------------------------------------------------------------------------- Data files


@st.composite
def data_files(draw, template) -> Case:
    """Return data sets of all kinds with damaged files."""
    kind = draw(st.sampled_from(list(template.data)))
    name, folder = template.data[kind]
    own = [path for path in template.files if path.startswith(f"{kind}/")]
    files = {}
    for path in draw(st.lists(st.sampled_from(own), min_size=1, max_size=2)):
        content = template.files[path]
        choices = [in_place(content)]
        if path.endswith(".npz"):
            choices.append(_arrays().map(_zipped))
        files[path] = draw(st.one_of(choices))
    return Case(files, read=(name, folder))


@st.composite
def _arrays(draw) -> bytes:
    """Return a .npy file whose header is odd."""
    shape = draw(st.sampled_from(["(40,)", "(-2, -4)", "(2**9999,)", "(10**15, 10**15)", "x"]))
    kind = draw(st.sampled_from(["<f8", "|O", "|S9", "nope", "[" * 3000, "<i1", ""]))
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}}}".encode()
    header = draw(st.just(header) | damaged(header) | st.just(b"(" * 5000 + b")" * 5000))
    version = draw(st.sampled_from([1, 1, 2, 3, 9]))
    length = len(header).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + header + bytes(320)


def _zipped(array: bytes) -> bytes:
    """Return an archive in which each of a data set's arrays is this one."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in "x_train", "y_train", "x_test", "y_test":
            archive.writestr(f"{name}.npy", array)
    return file.getvalue()


def kinds() -> dict[str, Any]:
    """Return {kind: a function from a template to a strategy of cases}."""
    found = command_lines, flagfiles, foreign_flags, data_files, whole_runs
    return {function.__name__: function for function in found}


# Of these the verbs do nothing: what is tried is how a command line is read.
READ_ONLY = "command_lines", "flagfiles"
