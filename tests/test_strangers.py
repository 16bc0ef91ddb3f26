"""Nothing that lies in the current folder runs unless the user has named it."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.programs import ROOT, environment
from towers import cli

pytestmark = pytest.mark.process

HOSTILE = 'import os\nopen(os.environ["TOWERS_TEST_MARK"], "a").write(__name__ + "\\n")\nTHIS\n'
NAMES = (
    "keras numpy tensorflow zipfile secrets random difflib queue calendar tqdm absl tensorboard "
    "h5py PIL pandas torch nvidia ml_dtypes ast pynvml packaging yaml towers_models"
).split()
RUN = "--model=models.resnet:resnet --model_args=depth=8,width=1 --batch_size=32 --devices=cpu"
TRAIN = f"train {RUN} --max_steps=2 --evaluate_every_epochs=0 --augment=none --train_dir=run"
ARGUMENTS = {
    "train": f"{TRAIN} --train_dir=again",
    "evaluate": "--train_dir=run",
    "verify": f"{RUN} --num_towers=1,2 --steps=1",
    "benchmark": f"{RUN} --num_towers=1,2 --windows=1 --seconds=0.1",
    "doctor": "",
    "sweep": f"{RUN} --max_steps=1 --vary=learning_rate:0.1,0.2 --evaluate_every_epochs=0",
    "predict": "--train_dir=run x.npy",
    "export": "--train_dir=run",
    "init": "mine",
    "worker": "--address=127.0.0.1:0",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which everything is called as something that somebody imports."""
    folder = tmp_path_factory.mktemp("strangers") / "hostile"
    (folder / "models").mkdir(parents=True)
    (folder / "scripts" / "peers").mkdir(parents=True)
    models = [f"models/{name}" for name in ("__init__", "resnet", "parts", "cnn")]
    for name in *NAMES, *models, "scripts/peers/session", "scripts/peers/mirrored":
        (folder / f"{name}.py").write_text(HOSTILE.replace("THIS", "raise ImportError"))
    np.save(folder / "x.npy", np.zeros([2, 32, 32, 3], np.uint8))
    return folder


def run(folder, *argv, **variables):
    """Return the exit code and output of a command that runs nothing of the folder."""
    mark = folder.parent / "mark"
    given = environment(TOWERS_TEST_MARK=str(mark), CUDA_VISIBLE_DEVICES="-1", **variables)
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    command = [sys.executable, "-m", "towers", *argv]
    with subprocess.Popen(command, cwd=folder, env=given, text=True, **pipes) as process:
        said = ""
        for line in process.stdout:
            said += line
            if line.startswith("free  "):
                process.send_signal(signal.SIGINT)
    found = mark.read_text().split() if mark.exists() else []
    mark.unlink(missing_ok=True)
    assert not found, (found, said)
    return process.returncode, said


def test_what_is_imported_by_the_command(folder):
    for path in "", f":{ROOT}", f".{os.pathsep}{folder}":
        code, _ = run(folder, "train", "--help", PYTHONPATH=os.pathsep.join([str(ROOT), path]))
        assert code == 0


@pytest.fixture(scope="module")
def foreign(folder, tmp_path_factory):
    """A run that lies there, of somebody else's."""
    if not (folder / "run").exists():
        code, said = run(folder, *TRAIN.split(), XDG_CONFIG_HOME=str(folder / "theirs"))
        assert code == 0, said
        assert "the one that comes with towers, not that of models/resnet.py" in said
    return folder


@pytest.mark.extended
@pytest.mark.parametrize("verb", ARGUMENTS)
def test_of_each_verb(foreign, verb):
    assert ARGUMENTS.keys() == cli.VERBS.keys()
    code, said = run(foreign, verb, *ARGUMENTS[verb].removeprefix("train ").split())
    assert code == 0, said
