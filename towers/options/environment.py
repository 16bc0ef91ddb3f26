"""What TensorFlow and Keras read from the environment, checked before they are imported.

Some values end the process without a word, or raise errors that name no variable.
"""

import json
import os
import re
import subprocess
import sys
import traceback

from towers.errors import InputError, reason
from towers.options import search_path

# {variable: pattern of the values that do not end the process at its start, and an example}
_ALLOWED = {
    "TF_DETERMINISTIC_OPS": ("(?i:0|1|true|false)", "1"),
    "TF_DETERMINISTIC_ORDER": ("(?i:0|1|true|false)", "1"),
    "TF_NUM_INTRAOP_THREADS": (r"(?!\s*-).*", "4"),
    "TF_MKL_ALLOC_MAX_BYTES": (r"\d{1,18}", "1000000000"),
    "TF_ENABLED_DEVICE_TYPES": ("|(.*,)?CPU(,.*)?", "CPU,GPU"),
    "AUTOGRAPH_VERBOSITY": (r"-?\d+", "0"),
    "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": ("upb|python", "upb"),
}
_FLAGS = "TF_XLA_FLAGS", "TF_JITRT_FLAGS"  # whose names TensorFlow alone knows


def check() -> None:
    """Raise InputError for a value that would end TensorFlow, and for another backend of Keras."""
    for name, (pattern, example) in _ALLOWED.items():
        value = os.environ.get(name)
        if value is not None and not re.fullmatch(pattern, value, re.DOTALL):
            raise InputError(
                f"{name}={value} would make TensorFlow exit; unset it, or type {name}={example}"
            )
    plugins = os.environ.get("TF_PLUGGABLE_DEVICE_LIBRARY_PATH")
    if plugins and not os.path.exists(plugins):
        raise InputError(f"TF_PLUGGABLE_DEVICE_LIBRARY_PATH={plugins} does not exist; unset it")
    keras = sys.modules.get("keras")
    path, in_file = _keras_json()
    backend = os.environ.get("KERAS_BACKEND") or in_file
    if hasattr(keras, "config"):
        backend = keras.config.backend()
    if backend != "tensorflow":
        where = "" if keras or os.environ.get("KERAS_BACKEND") else f" in {path}"
        raise InputError(
            f"the backend of Keras is {backend}{where}, but towers needs TensorFlow; type "
            "KERAS_BACKEND=tensorflow before the command, or set it before Keras is imported"
        )
    given = " ".join(f"{name}={os.environ[name]}" for name in _FLAGS if os.environ.get(name))
    if given and "tensorflow" not in sys.modules:
        tried = [sys.executable, "-c", "import tensorflow; tensorflow.constant(0)"]
        without_gpus = search_path.child_environment() | {"CUDA_VISIBLE_DEVICES": "-1"}
        pipes = dict(capture_output=True, text=True, errors="replace")
        done = subprocess.run(tried, env=without_gpus, **pipes)
        if done.returncode:
            said = re.findall(r"^F.*?\] (.*)", done.stderr, re.MULTILINE)
            raise InputError(f"{given}: {''.join(said[-1:]) or 'TensorFlow does not accept it'}")


def import_keras() -> None:
    """Import Keras and TensorFlow; raise InputError if their settings do not allow it."""
    check()
    try:
        import keras  # noqa: F401
    except (AttributeError, OSError, TypeError, ValueError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if not last.filename.endswith("keras/src/backend/config.py"):
            raise
        raise InputError(
            f"Keras does not accept its settings: {reason(error)}; correct or remove "
            f"{_keras_json()[0]} and KERAS_... in the environment"
        ) from None


def _keras_json() -> tuple[str, str]:
    """Return the path of Keras' settings, and the backend that they name, as Keras reads them."""
    base = os.path.expanduser("~")
    base = base if os.access(base, os.W_OK) else "/tmp"
    folder = os.environ.get("KERAS_HOME", os.path.join(base, ".keras"))
    path = os.path.expanduser(os.path.join(folder, "keras.json"))
    try:
        with open(path, encoding="utf-8") as file:
            return path, json.load(file).get("backend", "tensorflow")
    except (AttributeError, OSError, ValueError):  # `import_keras` tells
        return path, "tensorflow"
