"""scripts/peers: the lane protocol."""

import json
import math

import numpy as np
import pytest

from tests.programs import ROOT, python

pytestmark = pytest.mark.process

PEERS = ROOT / "scripts" / "peers"


def start(name, windows=(), environ=None, **config):
    """Run a peer as the protocol says; returns the JSON lines that it printed."""
    if name == "torch_ddp" and environ is None:
        pytest.importorskip("torch")
    tiny = {"image_shape": [8, 8, 3], "num_classes": 4, "batch_size": 8, "num_devices": 2}
    tiny |= {"learning_rate": 0.05, "steps_per_loop": 3}
    given = "".join(f"{seconds}\n" for seconds in windows)
    streams = dict(input=given, capture_output=True, timeout=110, variables=environ)
    done = python(PEERS / f"{name}.py", json.dumps(tiny | config), **streams)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


# The protocol.


# In windows; on images of a file, or on one batch.
IMAGES = {"augment": "tutorial", "image_shape": [9, 9, 3], "dtype": "mixed_bfloat16"}
IMAGES |= {"optimizer": "adamw"}
RESNET = {"model": "models.resnet:resnet", "model_args": {"depth": 8}}
RESNET |= {"augment": "resnet", "image_shape": [12, 12, 3]}
CONFIGS = {
    "towers_fit": {}, "mirrored_fit": {}, "mirrored": RESNET, "fit": IMAGES, "torch_ddp": IMAGES,
    "session": IMAGES | {"optimizer": "momentum"},
}  # fmt: skip


@pytest.mark.extended
@pytest.mark.parametrize("name", CONFIGS)
def test_a_peer_trains_in_windows(name, tmp_path):
    draw, config = np.random.default_rng(0), CONFIGS[name] | {"learning_rate": 0.02}
    if CONFIGS[name]:
        images = draw.integers(256, size=(40, 12, 12, 3), dtype=np.uint8)
        labels = draw.integers(4, size=40).astype(np.int32)
        np.savez(tmp_path / "a.npz", images=images, labels=labels)
        config |= {"data": str(tmp_path / "a.npz"), "ema_decay": 0.9, "learning_rate": 0.001}
    windows = 0, 0.2, 0
    ready, *reports, memory = start(name, windows, weight_decay=1e-4, **config)
    assert ready["ready"] is True
    versions = {"torch_ddp": {"torch"}, "session": {"tensorflow"}}
    assert set(ready["versions"]) == versions.get(name, {"tensorflow", "keras"})
    for report, seconds in zip(reports, windows, strict=True):
        assert set(report) == {"steps", "seconds", "loss"}
        assert report["steps"] > 0 and report["steps"] % 3 == 0
        assert report["seconds"] >= seconds and math.isfinite(report["loss"])
    assert 50 < memory["peak_memory_mib"] < 8000
    assert reports[0]["steps"] == 3
    if not CONFIGS[name]:
        assert reports[-1]["loss"] < reports[0]["loss"]


def test_missing_package_is_skipped_by_name(tmp_path):
    missing = "raise ModuleNotFoundError('No module named torch', name='torch')"
    (tmp_path / "torch.py").write_text(missing)
    [line] = start("torch_ddp", environ={"PYTHONPATH": str(tmp_path)})
    assert line == {"skipped": "torch is not installed: pip install -e '.[peers]'"}
