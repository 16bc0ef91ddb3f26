"""Finds whose code raised an error, for the line below a traceback."""

import contextlib
import os
import re
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path

# Also in messages, where AutoGraph and TensorFlow say where an op was created.
_FRAME = re.compile(r'^\W*File "([^"<>]+\.py)", line (\d+)(?:, in (\S+))?', re.MULTILINE)
_STDLIB = re.escape(sysconfig.get_path("stdlib"))
_TOWERS = str(Path(__file__).parents[1]) + os.sep


def describe_origin(error: BaseException, named: Mapping[str, str]) -> str:
    """Return a line that says where an error was raised and whose code that is.

    Args:
        error: the error, with its traceback.
        named: {flag: "module:function"} of the user's functions.
    """
    return locate_in_user_code(error, named) or (
        "the error comes from none of your own code: if `model.fit` does not fail alike without "
        "towers, please report it with the lines above"
    )


def locate_in_user_code(error: BaseException, named: Mapping[str, str]) -> str:
    """Return `describe_origin`'s line for the innermost frame of the user's own code, or "".

    Args:
        error: with its traceback.
        named: {flag: "module:function"} that the user has named.
    """
    modules = {flag: name.partition(":")[0] for flag, name in named.items()}
    installed = {m.partition(".")[0] for m in modules.values()} - {"keras", "tensorflow", "towers"}
    library = re.compile(
        rf".*/(site|dist)-packages/(?!({'|'.join(map(re.escape, installed))})[./])"
        rf"|.*__autograph_generated_file|{_STDLIB}/(?!.*-packages/)|{re.escape(_TOWERS)}"
    )
    all_frames = _FRAME.findall("".join(traceback.format_exception(error)))
    frames = [frame for frame in all_frames if not library.match(frame[0])]
    if not frames:
        return ""
    ends = {f: re.escape(m.replace(".", "/")) + r"(/__init__)?\.py" for f, m in modules.items()}
    flag = next((f for f, end in ends.items() if re.fullmatch(f".*/{end}", frames[-1][0])), None)
    hint = f" (--{flag}={named[flag]})" if flag else ""
    return f"the error comes from {_place(*frames[-1])}: your own code{hint}"


def _place(path: str, line: str, function: str) -> str:
    """Return "my_net.py, line 12, in build", with the path relative to the current folder."""
    shown = path
    with contextlib.suppress(FileNotFoundError):  # the current folder is gone
        shown = os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path
    return f"{shown}, line {line}" + (f", in {function}" if function else "")
