"""`python -m towers`, and the command `towers`: signals are heard before all else is imported."""

import os
import sys

try:
    from towers.options import search_path

    search_path.leave_out_current_folder()  # before anything is imported that may lie there, too

    from towers import signals
except KeyboardInterrupt:  # Ctrl-C, which nobody else hears yet
    sys.stderr.write("towers: interrupted by SIGINT\n")
    sys.stderr.flush()
    os._exit(130)


def main() -> None:
    """Run the command line of this process, and end it."""
    listener = signals.Listener(owner=True)
    try:
        listener.__enter__()  # for ever: a signal has its sentence up to the end
        from towers.cli import main as run

        code = run()
    except BaseException:  # while this was imported, where others may make another error of it
        if not listener.asked:
            raise
        code, line = listener.stopping(listener.asked)
        signals.print_error(line)
    listener.close(code)


if __name__ == "__main__":
    main()
