"""A bounded number of hostile inputs; `scripts/fuzz --minutes=N` tries more."""

import time

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz import engine, inputs
from tests.runs import released

pytestmark = pytest.mark.process

NUMBERS = dict(command_lines=20, flagfiles=20, foreign_flags=4, data_files=6, whole_runs=9)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return engine.make_template(tmp_path_factory.mktemp("template"))


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.filterwarnings("default")  # as where a user stands
@pytest.mark.parametrize("kind", released(NUMBERS, *NUMBERS.keys() - {"whole_runs"}))
def test_hostile_inputs_end_with_one_line(template, tmp_path, kind):
    @settings(
        max_examples=NUMBERS[kind],
        derandomize=True,  # the same each time: scripts/fuzz looks further
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def turn(data):
        case = data.draw(inputs.kinds()[kind](template))
        assert not engine.try_out(kind, case, template, tmp_path / "here")

    turn()


def test_what_goes_wrong_is_seen(template, tmp_path, monkeypatch):
    """A traceback, a hang, a wrong code, and code that runs: each by a fault that is put in."""
    folder = tmp_path / "here"
    whole = inputs.Case({}, ("init", "new"))
    assert engine.try_out("whole_runs", whole, template, folder) == ""
    monkeypatch.setattr(engine, "SECONDS", 0.2)
    monkeypatch.setattr("towers.commands.init.command.run", lambda *_: time.sleep(60))
    assert engine.try_out("whole_runs", whole, template, folder).startswith("hang")
    monkeypatch.setattr("towers.commands.init.command.run", lambda *_: 1 / 0)
    assert "ZeroDivisionError" in engine.try_out("whole_runs", whole, template, folder)
    monkeypatch.undo()
    flags = template.files["run/flags.cfg"] + b"--model=canary:sing\n"
    foreign = inputs.Case({"run/flags.cfg": flags}, ("export", "--train_dir=run"))
    assert engine.try_out("foreign_flags", foreign, template, folder) == ""
    monkeypatch.setattr("towers.options.code_trust.check", lambda *_: None)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr("towers.cli._check_names", lambda *_, **__: __import__("canary").sing())
    assert "code ran" in engine.try_out("foreign_flags", foreign, template, folder)
