"""scripts/speed beside programs that speak the protocol of peers and compute nothing."""

import json
from importlib import import_module
from pathlib import Path

import pytest

from tests import tiny
from tests.programs import ROOT, script
from towers import data
from towers.options.run import Options

pytestmark = pytest.mark.unit

# {} is what it does when it starts.
PEER = """
import json, sys
config = json.loads(sys.argv[1])
def say(**answer):
    print(json.dumps(answer), flush=True)
{}
print("a word of the library's own")
say(ready=True, versions={{"peer": "1.0"}})
for line in sys.stdin:
    say(steps=4, seconds=2.0, loss=1.0)
say(peak_memory_mib=12.5)
"""
KEEP_IMAGES = """
images = __import__('numpy').load(config['data'])
config['images'] = [images['images'].shape, int(images['labels'].sum())]
json.dump(config, open('config', 'w'))
"""
STARTS = {
    "mirrored": KEEP_IMAGES,
    "fit": "say(skipped='fit is not installed: pip install fit'); sys.exit()",
    "torch_ddp": "sys.stderr.write('first\\nno memory is left\\n'); sys.exit(3)",
    "session": "say(ready=True, versions={}); sys.exit(4)",  # before its first window
}


@pytest.fixture
def speed(folder, monkeypatch):
    """Return the script, with peers of these."""
    speed = script("speed")
    path = f"import sys\nsys.path.insert(0, {str(speed.FOLDER)!r})\n"
    (folder / "images.py").write_text(path + (speed.FOLDER / "images.py").read_text())
    for name, start in STARTS.items():
        (folder / f"{name}.py").write_text(PEER.format(start))
    monkeypatch.setattr(speed, "FOLDER", folder)
    return speed


@pytest.mark.extended
@pytest.mark.process
def test_peers_train_what_we_train_and_take_turns(speed, capsys):
    argv = "--against=mirrored,fit,torch_ddp,mirrored_own_layers,session --model=tests.tiny:dense "
    argv += "--num_towers=1,2 --windows=2 --seconds=0.02 --json --batch_size=8 --optimizer=adamw "
    argv += "--model_args=width=3 --dataset=tests.tiny:images --augment=none"
    assert speed.main(argv.split()) == 1  # a peer has failed
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert [row["num_towers"] for row in result["results"]] == [1, 2]
    ours, theirs = result["results"][1]["examples_per_second"], 8 * 4 / 2.0
    assert result["ratios"].keys() == {"mirrored", "mirrored_own_layers"}
    for name, ratio in result["ratios"].items():
        assert result["peers"][name] == {
            "examples_per_second": {"median": theirs, "min": theirs, "max": theirs},
            "peak_memory_mib": 12.5,
            "versions": {"peer": "1.0"},
        }
        assert ratio == pytest.approx(ours["median"] / theirs)
        assert result["ratio_ranges"][name]["max"] == pytest.approx(ours["max"] / theirs)
    assert result["skipped"] == {"fit": "fit is not installed: pip install fit"}
    assert result["failed"]["torch_ddp"].endswith("exit code 3: no memory is left")
    assert "exit code 4" in result["failed"]["session"] and "| mirrored |" in err
    config = json.loads(Path("config").read_text())
    images, labels = tiny.arrays(tiny.TRAIN_SIZE)
    assert config.pop("images") == [list(images.shape), int(labels.sum())]
    assert Path(config.pop("data")).name == "train.npz"
    assert config == {
        "model": "tests.tiny:dense", "model_args": {"width": 3}, "image_shape": [8, 8, 3],
        "num_classes": 3, "batch_size": 8, "num_devices": 2, "gpus": False, "dtype": "float32",
        "optimizer": "adamw", "learning_rate": 0.05, "momentum": 0.9, "weight_decay": 0.0,
        "ema_decay": 0.0, "augment": "none", "steps_per_loop": 10, "seed": 0, "own_layers": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    "given, code, remedy",
    [
        ("--against=fit,tensorpack", 2, "there are mirrored"),
        ("--against=fit --windows=0", 2, "at least 1"),
    ],
)
def test_bad_input_is_one_line(speed, capsys, given, code, remedy):
    assert speed.main(given.split()) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("speed: --") and remedy in line


@pytest.mark.graph
def test_data_that_are_no_images_with_classes_are_given_to_nobody(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts" / "peers")
    images, lane = import_module("images"), import_module("lane")
    for task in "table", "masks", "two":
        loaded = data.load(f"tests.tasks:{task}_data")
        with pytest.raises(lane.Skipped, match="no images as bytes"):
            images.export(loaded.train, str(tmp_path / "train.npz"))
    options = Options(dataset="tests.tiny:images", augment="none,cutout=2")
    with pytest.raises(lane.Skipped, match="do not know --augment=none,cutout=2"):
        images.main(options, str(tmp_path / "train.npz"))
    assert not (tmp_path / "train.npz").exists()
