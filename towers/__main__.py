"""`python -m towers`, and the command `towers`: it handles signals before other imports."""

import io
import os
import sys

from towers.options import search_path

search_path.leave_out_current_folder()  # before imports that it may hide

from towers import signals  # noqa: E402


class _Output(io.FileIO):
    """Standard output or error, of which a full disk or a closed terminal ends no command."""

    failed: str = ""  # why something could not be written

    def write(self, data: bytes) -> int:
        """Write bytes if possible; return how many are done."""
        try:
            return super().write(data)
        except BrokenPipeError:  # the reader has ended, as `head` does
            raise
        except OSError as error:
            self.failed = error.strerror
            return len(data)


def _open_streams() -> None:
    """Let any text be read, printed and named in files, whatever the terminal and the locale."""
    for descriptor in 0, 1, 2:
        try:
            os.fstat(descriptor)
        except OSError:  # closed, so that the next file would take its place
            os.open(os.devnull, os.O_RDWR)
    stdout = sys.stdout or open(1, "w", closefd=False)
    encoding, by_line = stdout.encoding, stdout.line_buffering or stdout.write_through  # of -u
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        # TensorFlow names files in UTF-8, so Python has to as well, from its start.
        os.environ.setdefault("PYTHONIOENCODING", encoding)
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(_Output(descriptor, "w", closefd=False)),
            encoding,
            "backslashreplace",
            line_buffering=descriptor == 2 or by_line,
        )
        for descriptor in (1, 2)
    )


def main() -> None:
    """Run the command line of this process, and exit."""
    _open_streams()
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
