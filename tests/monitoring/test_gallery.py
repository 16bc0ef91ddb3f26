"""Pictures of a run: where they stand, and that a run is worth more than they are."""

import pytest

from tests import tiny
from towers.monitoring import histograms, pictures
from towers.training.train import train

GIVEN = dict(model="tests.tiny:cnn", num_towers=2, num_epochs=2.0, evaluate_every_epochs=1.0)


def tags_at(folder):
    """Return {tag: steps at which it stands} of what is no scalar."""
    found = {}
    for step, value in tiny.records(folder):
        if value.metadata.plugin_data.plugin_name != "scalars":
            found.setdefault(value.tag, []).append(step)
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "plain"
    train(tiny.options(folder, **GIVEN))
    return folder


def test_pictures_stand_at_the_start_and_at_each_evaluation(plain):
    of_training = tags_at(plain / "train")
    assert set(of_training) == {"images/tower_0", "images/tower_1", "filters/sequential/conv2d"}
    assert set(map(tuple, of_training.values())) == {(0, 9, 18)}
    assert tags_at(plain / "eval") == {"confusion_matrix": [9, 18], "mistakes": [9, 18]}


def test_histograms_have_a_clock_of_their_own(plain, tmp_path):
    train(tiny.options(tmp_path, **GIVEN, histogram_every_epochs=0.5))
    found = tags_at(tmp_path / "train")
    drawn = {tag: steps for tag, steps in found.items() if not tag.startswith(("images", "filt"))}
    assert {tag.partition("/")[0] for tag in drawn} == {"weights", "gradients", "activations"}
    assert set(map(tuple, drawn.values())) == {(0, 5, 9, 13, 18)}
    assert {tag: found[tag] for tag in tags_at(plain / "train")} == tags_at(plain / "train")
    tiny.assert_identical(tiny.saved(tmp_path), tiny.saved(plain))


def test_a_picture_that_cannot_be_made_is_a_line_and_changes_nothing(
    plain, tmp_path, monkeypatch, capsys
):
    def fail(*_):
        raise ZeroDivisionError("of a\npicture")

    monkeypatch.setattr(pictures, "of_towers", fail)
    monkeypatch.setattr(pictures, "of_evaluation", fail)
    monkeypatch.setattr(histograms, "_add", fail)
    train(tiny.options(tmp_path, **GIVEN, histogram_every_epochs=1.0))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("no ")]
    assert lines == [
        "no pictures ZeroDivisionError: of a",
        "no histograms ZeroDivisionError: of a",
        "no mistakes ZeroDivisionError: of a",
    ]
    assert tags_at(tmp_path / "train") == tags_at(tmp_path / "eval") == {}
    tiny.assert_identical(tiny.saved(tmp_path), tiny.saved(plain))


def test_a_continued_run_shows_each_picture_once(plain, tmp_path):
    train(tiny.options(tmp_path, **GIVEN | dict(num_epochs=1.0)))
    train(tiny.options(tmp_path, **GIVEN))
    assert tags_at(tmp_path / "train") == tags_at(plain / "train")
    assert tags_at(tmp_path / "eval") == tags_at(plain / "eval")
