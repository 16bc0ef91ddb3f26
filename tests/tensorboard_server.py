"""A TensorBoard server on a folder, in this process, asked over HTTP as its pages ask it."""

import contextlib
import json
import re
import shlex
import subprocess
import sys
import urllib.parse
import urllib.request
import warnings
from pathlib import Path

with warnings.catch_warnings():  # of what it brings along
    warnings.simplefilter("ignore", DeprecationWarning)
    from tensorboard import default, program

EVERY_STATUS = ("STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING")


class Server:
    """Has read all that is in the folder when it is there; what comes later it does not see."""

    def __init__(self, folder: Path):
        server = program.TensorBoard(default.get_plugins())
        once = ["--load_fast=false", "--reload_interval=0", "--reload_task=blocking", "--port=0"]
        server.configure(argv=["tensorboard", f"--logdir={folder}", *once])
        self._address = server.launch()

    def get(self, path: str, **parameters: str):
        """Return the JSON, or else the text, of data/`path`."""
        query = urllib.parse.urlencode(parameters)
        return self._open(f"{self._address}data/{path}?{query}")

    def post(self, path: str, body: dict):
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "X-XSRF-Protected": "1"}
        return self._open(urllib.request.Request(f"{self._address}data/{path}", data, headers))

    def points(self, run: str, tag: str) -> list[tuple[int, float]]:
        """Return [(step, value)] of a curve."""
        found = self.get("plugin/scalars/scalars", run=run, tag=tag)
        return [(step, value) for _, step, value in found]

    def tags(self, plugin: str) -> set[tuple[str, str]]:
        """Return {(run, tag)} that a plugin shows."""
        found = self.get(f"plugin/{plugin}/tags")
        return {(run, tag) for run, tags in found.items() for tag in tags}

    def text(self, tag: str, run: str = ".") -> list[str]:
        return [entry["text"] for entry in self.get("plugin/text/text", run=run, tag=tag)]

    def columns(self) -> dict:
        """Return what declares the HParams table."""
        return self.post("plugin/hparams/experiment", {"experimentName": "", "hparamsLimit": 1000})

    def rows(self) -> dict[str, dict]:
        """Return {name: row} of the HParams table."""
        everything = {"experimentName": "", "allowedStatuses": EVERY_STATUS, "colParams": []}
        everything |= {"startIndex": 0, "sliceSize": 1000}
        found = self.post("plugin/hparams/session_groups", everything).get("sessionGroups", [])
        return {row["name"]: row for row in found}

    def _open(self, request):
        with urllib.request.urlopen(request, timeout=30) as answer:
            content = answer.read().decode()
        return json.loads(content) if "json" in answer.headers["Content-Type"] else content


@contextlib.contextmanager
def as_typed(command: str):
    """Run the line that a run prints, on any port; yield a server that may still be reading."""
    words = [sys.executable, "-m", "tensorboard.main", *shlex.split(command)[1:], "--port=0"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        try:
            server = Server.__new__(Server)
            lines = (re.search(r"http://\S+", line) for line in process.stderr)
            server._address = next(filter(None, lines))[0]
            yield server
        finally:
            process.terminate()


def metrics(row: dict) -> dict[str, float]:
    """Return {tag: value} of a row of the HParams table."""
    return {value["name"]["tag"]: value["value"] for value in row.get("metricValues", [])}
