"""`python -m towers`, and the command `towers`: it handles signals before other imports."""

from towers.options import search_path

search_path.leave_out_current_folder()  # before imports that it may hide

from towers import signals  # noqa: E402


def main() -> None:
    """Run the command line of this process, and exit."""
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
