"""Finds whose code raised an error, for the line below a traceback."""

import os
import re
import sysconfig
import traceback
from pathlib import Path

# Also in messages, where AutoGraph and TensorFlow say where an op was created.
_FRAME = re.compile(r'^\W*File "([^"<>]+\.py)", line (\d+)(?:, in (\S+))?', re.MULTILINE)
_STDLIB = re.escape(sysconfig.get_path("stdlib"))
_TOWERS = re.escape(str(Path(__file__).parents[1]) + os.sep)
_LIBRARY = re.compile(
    rf".*/(site|dist)-packages/|.*__autograph_generated_file|{_STDLIB}/|{_TOWERS}"
)


def describe_origin(error: BaseException) -> str:
    """Return a message on where an error was raised and whose code that is."""
    return locate_in_user_code(error) or (
        "this error does not come from your code; if plain `model.fit` works, please report it "
        "with the lines above"
    )


def locate_in_user_code(error: BaseException) -> str:
    """Return `describe_origin`'s line for the innermost frame of the user's own code, or ""."""
    all_frames = _FRAME.findall("".join(traceback.format_exception(error)))
    frames = [frame for frame in all_frames if not _LIBRARY.match(frame[0])]
    if not frames:
        return ""
    path, line, function = frames[-1]
    path = path.removeprefix(f"{Path.cwd()}{os.sep}")
    where = f"{path}, line {line}" + (f", in {function}" if function else "")
    return f"the error comes from your code: {where}"
