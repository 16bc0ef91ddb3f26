"""Hostile inputs: command lines, flagfiles, and the files that towers read, damaged.

Each kind of input is a Hypothesis strategy of `Case`s. A case is what stands in an empty folder
beside what `engine.Template` puts there, and what is done then.
"""

import copy
import dataclasses
import io
import json
import math
import re
import struct
import zipfile
from typing import Any

import numpy as np
from hypothesis import strategies as st

from towers import cli

LINK, FOLDER, PIPE = "link", "folder", "pipe"  # in the place of a file
CANARY = "canary:sing"  # code that an input names, and that must not run


@dataclasses.dataclass(frozen=True)
class Case:
    """An input: {path: what lies there} and what is done.

    There lie bytes, or (LINK, target), (FOLDER,), (PIPE,), or None: it is removed. `argv` is a
    command line; `read` is what is read in its place, as (kind, arguments), see `engine`.
    """

    files: dict[str, Any]
    argv: tuple[str, ...] = ()
    read: tuple[str, ...] = ()


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
    others = [None, (LINK, "missing"), (LINK, "."), (FOLDER,), (PIPE,), *texts]
    return st.one_of(damaged(content), damaged(content), st.sampled_from(others))


_ODD = st.sampled_from(
    [
        None, True, 0, -1, 3, 2**31, 2**63 - 1, -(2**63), 2**63, 10**400, 0.5, -1e308, math.nan,
        math.inf, "", "x", "max", "end", "float32[2]", "nope[3]", "\ud800", "\0", "a\nb", "9" * 999,
        [], [[]], [None], [0], ["x"], [[1, 2, "x"]], {}, {"": {}}, {"a": None}, {"a": {"a": []}},
    ]
)  # fmt: skip


@st.composite
def hostile_json(draw, content: bytes) -> bytes:
    """Return JSON that is well formed, but has wrong values somewhere, at any depth."""
    top = [json.loads(content)]
    for _ in range(draw(st.integers(1, 3))):
        holder, key = top, 0
        while holder[key] and isinstance(holder[key], dict | list) and draw(st.integers(0, 4)):
            holder = holder[key]
            key = draw(
                st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder)))
            )
        how = draw(st.integers(0, 9))
        if how == 0 and holder is not top:
            del holder[key]
        elif how == 1:
            holder[key] = [holder[key]]
        elif how == 2 and isinstance(holder, dict):
            holder[draw(st.text(max_size=3))] = holder.pop(key)
        else:
            holder[key] = copy.deepcopy(draw(_ODD))  # the next turn may change it
    text = json.dumps(top[0])
    if draw(st.integers(0, 9)) == 0:
        text = text.replace("{", '{"step": 1, "step": [], ', 1)
    return text.encode(draw(st.sampled_from(["utf-8"] * 8 + ["utf-8-sig", "utf-16"])))


@st.composite
def of_run(draw, name: str, content: bytes) -> Any:
    """Return what may lie in the place of a file of a run."""
    if name.endswith(".json") and draw(st.integers(0, 3)):
        return draw(hostile_json(content))
    return draw(in_place(content))


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
    names = [name for name in template.files if name.startswith("run/")]
    files = {}
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)):
        files[name] = draw(of_run(name, template.files[name]))
    if draw(st.integers(0, 3)) == 0:  # of whole folders
        part = draw(st.sampled_from(["train", "eval", "checkpoints"]))
        files |= {name: None for name in names if name.startswith(f"run/{part}/")}
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


@st.composite
def run_files(draw, template) -> Case:
    """Return a run in which JSON files and checkpoints are damaged, and restore it."""
    names = [name for name in template.files if re.match(r"run/(\w+\.json|checkpoints/)", name)]
    files = {}
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)):
        files[name] = draw(of_run(name, template.files[name]))
    return Case(files, read=("run", *template.argv))


# ---------------------------------------------------------------------------- Data files


_KEYS = "x_train", "y_train", "x_test", "y_test"


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
            choices.append(_arrays().map(lambda array: _zipped(dict.fromkeys(_KEYS, array))))
        files[path] = draw(st.one_of(choices))
    return Case(files, read=("data", name, folder))


@st.composite
def image_files(draw, template) -> Case:
    """Return an image of any kind, damaged."""
    name = draw(st.sampled_from([n for n in template.files if n.startswith("images/")]))
    return Case({name: draw(damaged(template.files[name]))}, read=("image", name))


_TYPES = "f4 >f8 f2 g >g c8 G O M8[s] m8 S3 U2 V5 f4,i4 ? u1 i1 >i4 u8".split()
_SHAPES = (), (0,), (1,), (40,), (40, 3), (40, 0), (40, 8, 8, 1), (40, 2, 2, 2)


@st.composite
def array_files(draw, template) -> Case:
    """Return a .npy or .npz file of arrays of any type and shape, perhaps damaged."""

    def array() -> bytes:
        kind = draw(st.sampled_from(_TYPES) | st.sampled_from(["f4", "u1", "U2"]))
        shape = draw(st.sampled_from(_SHAPES) | st.just((40, 3)))
        numbers = draw(
            st.sampled_from([0, 1, 2, 255, -1, 2**40, 1e300, np.nan, np.longdouble("1e4000")])
        )
        file = io.BytesIO()
        with np.errstate(all="ignore"):
            try:
                content = np.full(shape, numbers).astype(kind)
            except (TypeError, ValueError, OverflowError):
                content = np.zeros(shape, kind)
        np.save(file, content)
        return file.getvalue()

    odd = st.integers(0, 9).flatmap(lambda n: st.builds(array) if n else _arrays())
    if draw(st.booleans()):
        content, name = draw(odd), "a.npy"
    else:
        keys = draw(st.sampled_from(["x y", "x", "x_train y_train x_test y_test w_train", "x y z"]))
        content, name = _zipped({key: draw(odd) for key in keys.split()}), "a.npz"
    if draw(st.integers(0, 3)) == 0:
        content = draw(damaged(content))
    return Case({name: content}, read=("array", name))


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


def _zipped(arrays: dict[str, bytes]) -> bytes:
    """Return an archive of .npy files."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            archive.writestr(f"{name}.npy", array)
    return file.getvalue()


def kinds() -> dict[str, Any]:
    """Return {kind: a function from a template to a strategy of cases}."""
    found = (
        command_lines, flagfiles, foreign_flags, data_files, image_files, array_files, run_files,
        whole_runs,
    )  # fmt: skip
    return {function.__name__: function for function in found}


# Of these the verbs do nothing: what is tried is how a command line is read.
READ_ONLY = "command_lines", "flagfiles"
