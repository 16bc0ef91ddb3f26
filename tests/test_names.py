"""A run may have any name that the system takes: what is written there is read there."""

import pytest

import towers
from tests.runs import assert_has, command, done, released
from tests.tensorboard_server import read_scalars

pytestmark = pytest.mark.run
FLAGS = (
    "--model=tests.tiny:dense", "--dataset=tests.tiny:images", "--augment=standardize",
    "--batch_size=7", "--checkpoint_every_steps=3", "--log_every_steps=1",
)  # fmt: skip
NAMES = {
    # In 255 bytes, which are as many as a name may have.
    "signs": "-x [!a] a*b? a\\b 'it\"s' `y` $HOME \u00fc\U0001f600 %s%d {a,b}#c:d=e lr[0.1]"
    + "-"
    + "\u6f22" * 63,
    "levels": "/".join(["level"] * 200),
    "long": "n" * 255,
    "long in bytes": "\u6f22" * 85,
}


@pytest.mark.parametrize("kind", released(NAMES, "signs"))
def test_what_is_written_is_read(folder, capsys, kind):
    name = NAMES[kind]
    done(capsys, "train", name, *FLAGS, "--max_steps=4")
    assert "at step 4 of 6" in done(capsys, "train", name, "--max_steps=6")
    code, out, _ = command(capsys, "train", f"--flagfile={name}/flags.cfg")
    assert code == 0 and "has all its 6 steps" in out
    assert list(read_scalars(folder / name / "train")) == list(range(6))
    done(capsys, "evaluate", name)
    model = towers.load(name)
    if kind != "signs":  # which plain TensorFlow does not read
        assert_has(model, name)
    done(capsys, "export", name, "--output=plain.keras")
