"""The command line: towers VERB --flag=value ...

Exit codes: 0 done; 1 a check failed; 2 bad input or flags. 75 stopped on request, can be resumed;
76 stalled, with --on_stall=stop. 128 + N ended by signal N; 141 the reader of the output has
exited.
"""

import contextlib
import dataclasses
import difflib
import faulthandler
import json
import os
import pkgutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import towers
from towers import signals
from towers.errors import InputError, RunError
from towers.formatting import print_line
from towers.options import environment, flags
from towers.options.code_trust import CODE
from towers.options.error_origin import describe_origin
from towers.options.flags import Verb
from towers.options.functions import check_function, shadowing_file
from towers.options.parts import MACHINES_OPTION, PLACEMENT, GpuOptions
from towers.options.run import Options

EXIT_FAILED, EXIT_USAGE, EXIT_STOPPED, EXIT_PIPE = 1, 2, signals.EXIT_STOPPED, 141


def _stopped(number: int) -> tuple[int, str]:
    name = signal.Signals(number).name  # nothing to save
    return EXIT_STOPPED, f"stopped by {name}: nothing is lost; the same command resumes the run"


def _ended(number: int) -> tuple[int, str]:
    return 0, f"ended by {signal.Signals(number).name}"


_GPU_FLAGS = tuple(GpuOptions.__dataclass_fields__)
_DATA_FLAGS = "train_dir json trust model dataset data_dir image_size".split()
_EVALUATE_FLAGS = (*_DATA_FLAGS, "test_time_flip", "batch_size", "dtype", *PLACEMENT, *_GPU_FLAGS)
_PREDICT_FLAGS = "train_dir json trust test_time_flip batch_size".split()
_QUIET = "--json prints only the result"
_OF_A_RUN = "type --flagfile=RUN/flags.cfg for the flags of a run"
_VERBS = (
    Verb("train", "train a model on towers, or resume a run", run_flags="if_any",
          function="towers.training.train:train", tensorflow="options", stopping=_stopped),
    Verb("evaluate", "evaluate the newest checkpoint of a run on the test set",
          takes=_EVALUATE_FLAGS, run_flags="always",
          function="towers.training.evaluate:evaluate", tensorflow="options"),
    Verb("verify", "check on your model that N towers compute what one device computes",
          refuses={"train_dir": _OF_A_RUN, "quiet": _QUIET},
          options="towers.commands.verify.options:VerifyOptions", tensorflow="options"),
    Verb("benchmark", "measure speed and scaling",
          refuses=dict.fromkeys(PLACEMENT[2:], "it measures this machine")
          | {"train_dir": _OF_A_RUN, "quiet": _QUIET},
          options="towers.commands.benchmark.options:BenchmarkOptions", tensorflow="options"),
    Verb("doctor", "check this machine: versions, GPUs, and a computation on each device",
          takes=("json", *_GPU_FLAGS)),
    Verb("sweep", "train a run for each combination of flags, and list them, best first",
          options="towers.commands.sweep.options:SweepOptions", stopping=_stopped,
          refuses=dict.fromkeys(("train_dir", "overwrite"), "runs are in --sweep_dir")
          | {"quiet": _QUIET}),
    Verb("predict", "predict your own files with the trained model of a run",
          options="towers.commands.predict.options:PredictOptions", tensorflow="options",
          takes=(*_PREDICT_FLAGS, *PLACEMENT, *_GPU_FLAGS), run_flags="always"),
    Verb("export", "save the trained model of a run as a .keras file",
          options="towers.commands.export.options:ExportOptions",
          takes=("train_dir", "overwrite", "json", "trust"), run_flags="always", tensorflow="cpu"),
    Verb("init", "write a model, data and flags to start from",
          options="towers.commands.init.command:InitOptions"),
    Verb("worker", "lend the devices of this machine to a program on another machine",
          options="towers.commands.worker.command:WorkerOptions",
          takes=("address", *_GPU_FLAGS), tensorflow="import", stopping=_ended),
)  # fmt: skip
VERBS = {verb.name: verb for verb in _VERBS}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process; return its exit code."""
    with signals.listening() as listener:
        try:
            code = _main(list(sys.argv[1:] if argv is None else argv), listener)
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()
            return code
        except BrokenPipeError:  # the reader of the output has ended, such as `head`
            with contextlib.suppress(OSError):
                signals.print_error("nothing reads its output any more")
            for descriptor in 1, 2:  # else Python complains at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
            return EXIT_PIPE


def _print(result: str) -> None:
    """Print a result, or its end; raise RunError if it could not be written."""
    print(result, end="", flush=True)
    output = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if failed := getattr(output, "failed", ""):
        raise RunError(f"standard output cannot be written: {failed}")


def _main(argv: Sequence[str], listener: signals.Listener) -> int:
    start = time.perf_counter()
    name, rest = argv[0] if argv else "help", argv[1:]
    try:
        if name in ("--help", "-h", "-help", "help"):
            _print(flags.main_help(towers.__version__, _VERBS))
            return 0
        if name in ("--version", "-version"):
            _print(f"towers {towers.__version__}\n")
            return 0
        if name not in VERBS:
            close = difflib.get_close_matches(name, VERBS, n=1)
            usage = f"towers {'|'.join(VERBS)} --flag=value ..."
            usage = f"did you mean towers {close[0]}?" if close else usage
            raise InputError(f"there is no command {name!r}: {usage}")
        listener.stopping = VERBS[name].stopping or listener.stopping
        if VERBS[name].tensorflow == "import":  # its objects take seconds to delete, or abort
            listener.keep(VERBS)
        if {"--help", "-h", "-help"} & set(rest):
            _print(flags.verb_help(VERBS[name]))
            return 0
        return _run(VERBS[name], parse(name, rest), start)
    except InputError as error:
        return _fail(error, EXIT_USAGE)
    except RunError as error:
        for note in getattr(error, "__notes__", ()):
            print_line(note, sys.stderr)
        return _fail(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return _end(listener)
    except BrokenPipeError:
        raise
    except (Exception, SystemExit, GeneratorExit) as error:  # sys.exit() of own code, too
        if listener.asked:  # libraries may turn it into other errors at import
            return _end(listener)
        print_line("".join(traceback.format_exception(error)).rstrip(), sys.stderr)
        return _fail(describe_origin(error), EXIT_FAILED)


def parse(name: str, argv: Sequence[str]) -> Any:
    """Return the options of a verb's arguments, like `flags.parse`."""
    return flags.parse(argv, VERBS[name])


def _values(options: Any) -> dict[str, Any]:
    run_options = getattr(options, "run", {})
    return (run_options if isinstance(run_options, dict) else vars(run_options)) | vars(options)


def _fail(message: object, exit_code: int) -> int:
    signals.print_error(message)
    return exit_code


def _end(listener: signals.Listener) -> int:
    """Print the line for the end by a signal or a KeyboardInterrupt; return the exit code."""
    if listener.asked is None:
        return _fail("interrupted", 128 + signal.SIGINT)
    return _fail(*reversed(listener.stopping(listener.asked)))


def _run(verb: Verb, options: Any, start: float) -> int:
    run_options = getattr(options, "run", options)
    as_json = options.json if hasattr(options, "json") else getattr(run_options, "json", False)
    # The standard output of predict is for other programs, too.
    out = sys.stderr if as_json or verb.name == "predict" else sys.stdout

    def say(line: str) -> None:
        print_line(line, out)

    if verb.name not in ("doctor", "init"):
        environment.check()
    if verb.tensorflow == "import":
        with quiet_start(3):  # the loss of a program is no error of a server
            import tensorflow  # noqa: F401
    elif verb.tensorflow:
        _check_names(options, data=verb.takes is None or "dataset" in verb.takes)
        if "tensorflow" not in sys.modules and not getattr(run_options, "quiet", False):
            say("starting    TensorFlow")
        # The run's own lines report what is lost.
        with quiet_start(3 if getattr(options, MACHINES_OPTION, "") else 2):
            by_options = verb.tensorflow == "options"
            _start(run_options if by_options else dataclasses.replace(run_options, devices="cpu"))
    default = f"towers.commands.{verb.name}.command:run"
    function = pkgutil.resolve_name(verb.function or default)
    result = function(options, start if verb.name == "train" else say)
    if as_json and result:
        _print(json.dumps(result, default=dataclasses.asdict) + "\n")
    elif verb.name == "predict":
        _print("")  # whose rows are written
    if isinstance(result, list):  # the doctor's checks
        return EXIT_FAILED if any(check.status == "problem" for check in result) else 0
    if result is None or result.get("interrupted"):  # stopped after saving
        return EXIT_STOPPED
    if result.get("failed") or not result.get("passed", True):
        return EXIT_FAILED
    return EXIT_STOPPED if result.get("stopped") else 0


def _check_names(options: Any, data: bool) -> None:
    """Raise InputError for unknown names, as far as that needs no TensorFlow."""
    values = _values(options)
    named = [(flag, name) for flag in CODE for name in str(values.get(flag, "")).split(",")]
    for flag, name in named:
        if (":" in name or flag == "model") and (data or flag != "dataset"):
            check_function(flag, name)
            if user_file := shadowing_file(name):
                signals.print_error(
                    f"--{flag}={name} is the function of towers, not that of {user_file}; rename "
                    "yours to use it"
                )
    if not data:
        return
    from towers.data import registry

    if values["dataset"] != "synthetic":
        registry.locate(values["dataset"], values["data_dir"])


def _start(options: Options) -> None:
    """Import Keras, and start TensorFlow's devices with the GPU options."""
    environment.import_keras()
    from towers import devices

    if options.devices.strip().lower() == "cpu" and not options.visible_gpus:
        options = dataclasses.replace(options, visible_gpus="none")  # left to others
    devices.configure_run(options)


@contextlib.contextmanager
def quiet_start(level: int = 2) -> Iterator[None]:
    """Hold back the output of TensorFlow's C++ code during its start; print it if that fails.

    Later it writes errors, or at `level` 3 only fatal ones. If the process crashes in C++, Python's
    fault handler prints where. If the user has set TF_CPP_MIN_LOG_LEVEL, that stays, and at 0 or 1
    nothing is held back.
    """
    asked = os.environ.get("TF_CPP_MIN_LOG_LEVEL")
    if asked in ("0", "1") or "tensorflow" in sys.modules:
        yield
        return
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = asked or str(level)
    with open(os.memfd_create("held"), "w+b") as held, open(os.dup(2), "wb") as stderr:
        os.dup2(held.fileno(), 2)
        faulthandler.enable(stderr)
        try:
            yield
        except InputError:  # its message is enough
            raise
        except Exception:
            held.seek(0)
            stderr.write(held.read())
            raise
        finally:
            faulthandler.disable()
            os.dup2(stderr.fileno(), 2)
