"""A bounded number of hostile inputs; `scripts/fuzz --minutes=N` tries more."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import engine, inputs

# Of each kind, in a few seconds.
NUMBERS = {
    "command_lines": 150, "flagfiles": 60, "foreign_flags": 60, "texts_of_runs": 50,
    "event_files": 50, "data_files": 60, "whole_runs": 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return engine.make_template(tmp_path_factory.mktemp("template"))


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_all_kinds_are_tried():
    assert list(NUMBERS) == list(inputs.kinds())


@pytest.mark.filterwarnings("default")  # as where a user stands
@pytest.mark.parametrize("kind", NUMBERS)
def test_hostile_inputs_end_with_one_line(template, tmp_path, kind):
    @settings(max_examples=NUMBERS[kind], deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def turn(data):
        case = data.draw(inputs.kinds()[kind](template))
        assert not engine.try_out(kind, case, template, tmp_path / "here")

    turn()


def test_what_goes_wrong_is_seen(template, tmp_path, monkeypatch):
    """A traceback, a hang, a wrong code, and code that runs: each by a fault that is put in."""
    folder = tmp_path / "here"
    whole = inputs.Case({}, ("compare", "run", "other", "--plot=none"))
    assert engine.try_out("texts_of_runs", whole, template, folder) == ""
    monkeypatch.setattr(engine, "SECONDS", 0.01)
    assert engine.try_out("texts_of_runs", whole, template, folder).startswith("hang")
    monkeypatch.undo()
    named = inputs.Case({}, ("compare", "run", "other", "--objective=none_such"))
    assert engine.try_out("texts_of_runs", named, template, folder) == ""
    monkeypatch.setattr("towers.monitoring.curves.read_curves", lambda *_: 1 / 0)
    monkeypatch.setattr("towers.commands.compare.command.read_curves", lambda *_: 1 / 0)
    assert "ZeroDivisionError" in engine.try_out("texts_of_runs", whole, template, folder)
    flags = template.files["run/flags.cfg"] + b"--model=canary:sing\n"
    foreign = inputs.Case({"run/flags.cfg": flags}, ("export", "--train_dir=run"))
    assert engine.try_out("foreign_flags", foreign, template, folder) == ""
    monkeypatch.setattr("towers.options.trust.check", lambda *_: None)
    monkeypatch.setattr("towers.cli._check_names", lambda *_, **__: __import__("canary").sing())
    assert "code ran" in engine.try_out("foreign_flags", foreign, template, folder)
