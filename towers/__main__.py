"""`python -m towers`, and the command `towers`: it handles signals before other imports."""

import os
import sys

from towers.options import search_path

search_path.leave_out_current_folder()  # before imports that it may hide

from towers import signals  # noqa: E402


def _prepare_texts() -> None:
    """Let any text be read, printed and named in files, whatever the terminal and the locale."""
    for descriptor in 0, 1, 2:
        try:
            os.fstat(descriptor)
        except OSError:  # closed, so that the next file would take its place
            os.open(os.devnull, os.O_RDWR)
    stdout = sys.stdout = sys.stdout or open(1, "w")
    sys.stderr = sys.stderr or open(2, "w")
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        # TensorFlow names files in UTF-8, so Python has to as well, from its start.
        os.environ.setdefault("PYTHONIOENCODING", stdout.encoding)
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    stdout.reconfigure(errors="backslashreplace")


def main() -> None:
    """Run the command line of this process, and exit."""
    _prepare_texts()
    listener = signals.Listener(owner=True)
    try:
        listener.__enter__()  # until the process ends
        from towers.cli import main as run

        code = run()
    except BaseException:  # libraries may turn Ctrl-C into other errors at import
        if not listener.asked:
            raise
        code, line = listener.stopping(listener.asked)
        signals.print_error(line)
    listener.close(code)


if __name__ == "__main__":
    main()
