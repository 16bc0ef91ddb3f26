"""`python -m towers`, and the command `towers`: signals are heard before all else is imported."""

from towers.options import search_path

search_path.leave_out_current_folder()  # before anything is imported that may lie there, too

from towers import signals  # noqa: E402


def main() -> None:
    """Run the command line of this process, and end it."""
    listener = signals.Listener(owner=True)
    listener.__enter__()  # for ever: a signal has its sentence up to the end
    try:
        from towers.cli import main as run

        code = run()
    except signals.Ended:  # while this was imported
        code, line = listener.stopping(listener.asked)
        signals.complain(line)
    listener.close(code)


if __name__ == "__main__":
    main()
