"""Programs in processes of their own, in the environment of a user, which no test has silenced."""

import importlib.machinery
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
TENSORFLOWS_LINES = re.compile(
    r"^[IWEF]\d{4} |^WARNING: All log messages|^To enable the following", re.M
)


def environment(**changes: str) -> dict[str, str]:
    """Return what a user's environment is like, as far as tests have changed it."""
    own = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    return own | {"PYTHONPATH": str(ROOT)} | changes


def python(*argv, cwd=ROOT, variables=None, **streams) -> subprocess.CompletedProcess:
    """Run Python to its end; what it writes is kept, unless it goes elsewhere."""
    streams = streams or {"capture_output": True}
    given = dict(cwd=cwd, env=environment(**(variables or {})), text=True)
    return subprocess.run([sys.executable, *argv], **given, **streams)


def script(name: str) -> ModuleType:
    """Return a script, whose file has no suffix, as a module."""
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / "scripts" / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module
