"""A bounded number of hostile inputs; `scripts/fuzz --minutes=N` tries more."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz import engine, inputs
from tests.runs import released

pytestmark = pytest.mark.process

NUMBERS = dict(
    command_lines=20, flagfiles=20, foreign_flags=4, data_files=6, image_files=20, array_files=20,
    run_files=20, whole_runs=9,
)  # fmt: skip


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
