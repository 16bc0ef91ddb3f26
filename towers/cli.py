"""The command line: towers VERB --flag=value ...

Exit codes: 0 done; 1 a check failed; 2 bad input or flags; 75 stopped on request, after saving.
"""

import contextlib
import dataclasses
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import towers
from towers.errors import InputError, RunError
from towers.options import flags
from towers.options.run import Options

EXIT_FAILED, EXIT_USAGE, EXIT_STOPPED, EXIT_INTERRUPTED = 1, 2, 75, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return its exit code.

    Args:
        argv: what stands after `towers`; sys.argv by default.
    """
    start = time.perf_counter()
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("--help", "-h", "-help", "help"):
        print(flags.main_help(towers.__version__), end="")
        return 0
    if argv[0] in ("--version", "-version"):
        print(f"towers {towers.__version__}")
        return 0
    verb, rest = argv[0], argv[1:]
    try:
        if verb not in flags.VERBS:
            raise InputError(
                f"there is no verb {verb!r}: towers {'|'.join(flags.VERBS)} --flag=value ..."
            )
        if {"--help", "-h", "-help"} & set(rest):
            print(flags.verb_help(verb), end="")
            return 0
        with _no_end_by_sigusr2(verb):
            return _run(verb, flags.parse(verb, rest), start)
    except InputError as error:
        return _complain(error, EXIT_USAGE)
    except RunError as error:
        return _complain(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return _complain("interrupted", EXIT_INTERRUPTED)


@contextlib.contextmanager
def _no_end_by_sigusr2(verb: str) -> Iterator[None]:
    """Let the signal that asks a run for a profile not end it while it starts or ends."""
    here = threading.current_thread() is threading.main_thread()
    if verb != "train" or not here:
        yield
        return
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR2, before)


def _complain(message: object, exit_code: int) -> int:
    """Print one line, whatever line breaks the user's own words bring into it."""
    print("towers:", " ".join(str(message).splitlines()), file=sys.stderr)
    return exit_code


def _run(verb: str, options: Options, start: float) -> int:
    """Run a verb with its options."""
    sys.path.insert(0, os.getcwd())  # models.cnn:cnn is found where the user stands
    out = sys.stderr if options.json else sys.stdout

    def say(line: str) -> None:
        print(line, file=out, flush=True)

    if verb == "doctor":
        return _doctor(options, say)
    if verb == "tensorboard":
        from towers.commands.tensorboard.command import tensorboard

        tensorboard(options, say)
        return 0
    if verb == "sweep":
        return _sweep(options, say)
    if verb == "compare":
        from towers.commands.compare.command import compare

        result = compare(options, say)
        if options.json:
            print(json.dumps(result))
        return 0
    with _quiet_start():
        _start(dataclasses.replace(options, devices="cpu") if verb == "plan" else options)
    if verb == "train":
        from towers.training.train import train

        result = train(options, start)
        if result is None:
            return EXIT_STOPPED
    elif verb == "verify":
        from towers.commands.verify.command import verify

        result = verify(options, say)
    elif verb == "benchmark":
        from towers.commands.benchmark.command import benchmark

        result = benchmark(options, say)
    elif verb == "plan":
        from towers.commands.plan.command import plan

        result = plan(options, say)
    else:
        from towers.training.evaluate import evaluate

        result = evaluate(options, say)
    if options.json:
        print(json.dumps(result))
    failed = (verb == "verify" and not result["passed"]) or result.get("failed")
    return EXIT_FAILED if failed else 0


def _start(options: Options) -> None:
    """Import what takes long, and let TensorFlow list its devices as the options say."""
    import keras  # noqa: F401

    from towers import devices

    gpu_options = options.gpu_options()
    if options.devices.strip().lower() == "cpu" and not options.visible_gpus:
        gpu_options = dataclasses.replace(gpu_options, visible_gpus="none")  # left to others
    devices.configure(**dataclasses.asdict(gpu_options))


def _doctor(options: Options, say: Callable[[str], None]) -> int:
    """Check the machine. TensorFlow is not started here: that may be what is wrong."""
    from towers.commands.doctor.command import doctor

    if options.dataset == "cifar10":  # which is looked for by a module that imports TensorFlow
        with contextlib.suppress(Exception), _quiet_start():
            from towers import data  # noqa: F401
    checks = doctor(options, say)
    if options.json:
        print(json.dumps([dataclasses.asdict(check) for check in checks]))
    return EXIT_FAILED if any(check.status == "problem" for check in checks) else 0


def _sweep(options: Options, say: Callable[[str], None]) -> int:
    """Make the runs of a sweep, in processes of their own: TensorFlow is not started here."""
    from towers.commands.sweep.command import sweep

    result = sweep(options, say)
    if options.json:
        print(json.dumps(result))
    if result["interrupted"]:
        return EXIT_STOPPED
    if result["failed"]:
        return EXIT_FAILED
    return EXIT_STOPPED if result["stopped"] else 0


@contextlib.contextmanager
def _quiet_start() -> Iterator[None]:
    """Hold back what TensorFlow's C++ writes while it starts; show it if the start fails.

    A failure may be an abort in C++, after which nothing runs in this process; so a process of its
    own waits for the outcome. A user who sets TF_CPP_MIN_LOG_LEVEL gets what it says.
    """
    if "TF_CPP_MIN_LOG_LEVEL" in os.environ or "tensorflow" in sys.modules:
        yield
        return
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"  # errors only, once it has started
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held:
        outcome, started = os.pipe()
        watcher = os.fork()
        if watcher == 0:
            try:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                os.close(started)
                if not os.read(outcome, 1):
                    held.seek(0)
                    os.write(2, held.read())
            finally:
                os._exit(0)
        stderr = os.dup(2)
        os.dup2(held.fileno(), 2)
        well = b"1"
        try:
            yield
        except InputError:  # which says all itself
            raise
        except Exception:
            well = b""
            raise
        finally:
            os.dup2(stderr, 2)
            os.write(started, well)
            for descriptor in (stderr, outcome, started):
                os.close(descriptor)
            os.waitpid(watcher, 0)
