"""Describes versions and the machine."""

import importlib.metadata
import platform
import re
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import towers
from towers.devices import nvml


def versions() -> dict[str, str | None]:
    """Return {"python": "3.11.7", ...}; None for missing parts, such as a driver."""
    build = tf.sysconfig.get_build_info()
    return {
        "python": platform.python_version(),
        "towers": towers.__version__,
        "tensorflow": tf.__version__,
        "tensorflow_source": str(tf.version.GIT_VERSION),
        "keras": keras.__version__,
        "numpy": np.__version__,
        "tensorboard": importlib.metadata.version("tensorboard"),
        "cuda_build": build.get("cuda_version"),
        "cudnn_build": build.get("cudnn_version"),
        "driver": nvml.driver_version(),
        "platform": platform.platform(),
    }


def processor() -> str:
    """Return the processor's name."""
    match = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return match[1].strip() if match else platform.machine()
