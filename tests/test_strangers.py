"""Nothing that lies in the current folder runs unless the user has named it."""

import os
import subprocess
import sys

import pytest

from tests.programs import ROOT, environment

pytestmark = pytest.mark.process

HOSTILE = 'import os\nopen(os.environ["TOWERS_TEST_MARK"], "a").write(__name__ + "\\n")\nTHIS\n'
NAMES = (
    "keras numpy tensorflow zipfile secrets random difflib queue calendar tqdm absl tensorboard "
    "h5py PIL pandas torch nvidia ml_dtypes ast pynvml packaging yaml towers_models"
).split()
RUN = "--model=models.resnet:resnet --model_args=depth=8,width=1 --batch_size=32 --devices=cpu"
TRAIN = f"train {RUN} --max_steps=2 --evaluate_every_epochs=0 --augment=standardize --train_dir=run"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which everything is called as something that somebody imports."""
    folder = tmp_path_factory.mktemp("strangers") / "hostile"
    (folder / "models").mkdir(parents=True)
    (folder / "scripts" / "peers").mkdir(parents=True)
    models = [f"models/{name}" for name in ("__init__", "resnet", "parts", "cnn")]
    for name in *NAMES, *models, "scripts/peers/session", "scripts/peers/mirrored":
        (folder / f"{name}.py").write_text(HOSTILE.replace("THIS", "raise ImportError"))
    return folder


def run(folder, *argv, **variables):
    """Return the exit code and output of a command that runs nothing of the folder."""
    mark = folder.parent / "mark"
    given = environment(TOWERS_TEST_MARK=str(mark), CUDA_VISIBLE_DEVICES="-1", **variables)
    command = [sys.executable, "-m", "towers", *argv]
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    done = subprocess.run(command, cwd=folder, env=given, text=True, **pipes)
    found = mark.read_text().split() if mark.exists() else []
    mark.unlink(missing_ok=True)
    assert not found, (found, done.stdout)
    return done.returncode, done.stdout


def test_what_is_imported_by_the_command(folder):
    for path in "", f":{ROOT}", f".{os.pathsep}{folder}":
        code, _ = run(folder, "train", "--help", PYTHONPATH=os.pathsep.join([str(ROOT), path]))
        assert code == 0


@pytest.mark.extended
def test_of_a_run_and_what_reads_it(folder):
    code, said = run(folder, *TRAIN.split())
    assert code == 0, said
    assert "the function of towers, not that of models/resnet.py" in said
    for verb in "evaluate", "export":
        code, said = run(folder, verb, "--train_dir=run")
        assert code == 0, said
