"""scripts/soak: a few of its rounds, and that it notices what is wrong."""

import json
import sys

import pytest

from scripts.soak_run import Run, Wrong
from tests.programs import python

pytestmark = pytest.mark.process


@pytest.mark.extended
@pytest.mark.timeout(600)  # of a busy machine
def test_some_rounds_pass(tmp_path):
    faults, folder = ["terminated", "killed_in_save", "damaged", "blocked"], tmp_path / "soak"
    flags = [f"--rounds={len(faults)}", f"--faults={','.join(faults)}", f"--folder={folder}"]
    done = python("scripts/soak", *flags, "--json")
    assert done.returncode == 0, done.stderr
    rounds = json.loads(done.stdout)
    assert sorted(r["fault"] for r in rounds) == sorted(faults)
    assert not any(r["wrong"] for r in rounds) and not folder.exists()


@pytest.mark.parametrize(
    ("program", "wrong"),
    [
        ("exit(3)", r"ended with 3, not \(0, 75\)"),
        ("exit(75)", "ended with 75 and no line"),
        ("import sys; print('Traceback ...', file=sys.stderr)", "shows a traceback"),
        (
            "import sys; print('towers: step 7 is saved', file=sys.stderr); exit(75)",
            "but there is none",
        ),
        ("import time; time.sleep(60)", "did not end within 1 s"),
    ],
)
def test_an_end_that_no_page_has_is_noticed(program, wrong, tmp_path):
    with Run("dropout", tmp_path / "run") as run:
        run.command = [sys.executable, "-c", program]
        run.start()
        with pytest.raises(Wrong, match=wrong):
            run.end(0, 75, seconds=1 if "sleep" in program else 60)


@pytest.mark.unit
def test_what_a_run_leaves_half_written_is_noticed(tmp_path):
    with Run("dropout", tmp_path / "run") as run:
        folder = run.train_dir / "checkpoints"
        folder.mkdir(parents=True)
        (folder / "ckpt-50_temp").mkdir()
        with pytest.raises(Wrong, match="still has ckpt-50_temp"):
            run.final()
