"""A TensorBoard server on a folder, in this process, asked over HTTP as its pages ask it."""

import json
import urllib.parse
import urllib.request
import warnings
from pathlib import Path

with warnings.catch_warnings():  # of what it brings along
    warnings.simplefilter("ignore", DeprecationWarning)
    from tensorboard import default, program
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator


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

    def rows(self) -> dict[str, dict]:
        """Return {name: row} of the HParams table."""
        every = ("STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING")
        asked = {"experimentName": "", "allowedStatuses": every, "colParams": []}
        data = json.dumps(asked | {"startIndex": 0, "sliceSize": 1000}).encode()
        url = f"{self._address}data/plugin/hparams/session_groups"
        headers = {"Content-Type": "application/json", "X-XSRF-Protected": "1"}
        found = self._open(urllib.request.Request(url, data, headers))
        return {row["name"]: row for row in found.get("sessionGroups", [])}

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

    def _open(self, request):
        with urllib.request.urlopen(request, timeout=30) as answer:
            content = answer.read().decode()
        return json.loads(content) if "json" in answer.headers["Content-Type"] else content


def read_scalars(folder: Path) -> dict[int, dict[str, float]]:
    """Return {step: {tag: value}} of a folder's scalars, as TensorBoard shows them."""
    accumulator = EventAccumulator(str(folder), {SCALARS: 0})
    if folder.is_dir():
        accumulator.Reload()
    points: dict[int, dict[str, float]] = {}
    for tag in accumulator.Tags()[SCALARS]:
        for event in accumulator.Scalars(tag):
            points.setdefault(event.step, {})[tag] = event.value
    return dict(sorted(points.items()))
