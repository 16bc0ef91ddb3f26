"""Which runs a sweep is made of: what --vary means, grids, random samples, names."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import runs
from towers import cli
from towers.commands.sweep.options import MAX_NAME, Varied, describe, name_of, parse, plan, sample
from towers.errors import InputError
from towers.options.run import Options

pytestmark = pytest.mark.unit


def plan_of(*argv):
    return plan(cli.parse("sweep", ["--sweep_dir=S", *argv]))


def refusal(*argv):
    """Return the message with which a sweep is refused."""
    return runs.refusal(plan_of, *argv)


@pytest.mark.parametrize(
    "text, values",
    [
        ("learning_rate:0.05,0.1,1e-3", (0.05, 0.1, 0.001)),
        ("learning_rate: 0.05, 0.1", (0.05, 0.1)),
        ("--learning_rate:1", (1.0,)),
        ("learning_rate:0.1,0.10", (0.1,)),
        ("seed:1,2", (1, 2)),
        ("num_gpus:1,2", (1, 2)),
        ("jit_compile:true,false", (True, False)),
        ("model:models.cnn:cnn,my.net:net", ("models.cnn:cnn", "my.net:net")),
        ("model_args:depth=20,width=8;depth=32,width=8", ("depth=20,width=8", "depth=32,width=8")),
        ("model_args:depth=20,width=8;", ("depth=20,width=8",)),
        ("model_args:;depth=20", ("", "depth=20")),
        ("model_args:depth=20,depth=32", ("depth=20", "depth=32")),
        ("decay_epochs:80,120;60,90", ("80,120", "60,90")),
        ("data_dir:../a,../b", ("../a", "../b")),
        # ranges, and whether their logarithm is even
        ("learning_rate:log(0.01..0.3)", (0.01, 0.3, True)),
        ("learning_rate:log( 1e-4 .. 1e-1 )", (1e-4, 0.1, True)),
        ("momentum:0.1..0.9", (0.1, 0.9, False)),
        ("momentum:.1...9", (0.1, 0.9, False)),
        ("batch_size:16..256", (16, 256, False)),
        ("batch_size:log(16..256)", (16, 256, True)),
    ],
)
def test_lists_and_ranges(text, values):
    varied = parse(text)
    found = varied.values or (varied.low, varied.high, varied.log)
    assert found == values
    assert [type(value) for value in found] == [type(value) for value in values]


MESSAGES = {
    "learning_rat:1": "did you mean --learning_rate?",
    "learning_rate": "FLAG:VALUE,VALUE is needed, as --vary=learning_rate:0.05,0.1",
    "train_dir:a,b": "the sweep gives each run its own --train_dir",
    "samples:1,2": "there is no flag --samples; see towers train --help",
    "batch_size:1.5": "--batch_size=1.5: a whole number is needed",
    "batch_size:8,0": "the run batch_size=0: --batch_size=0: a whole number of at least 1",
    "jit_compile:yes": "--jit_compile=yes: true or false is needed",
    "schedule:step": "the run schedule=step: --schedule=step needs --decay_epochs",
    "learning_rate:0.1..0.3": "--vary=learning_rate is a range: give the number",
    "learning_rate:0.3..0.1": "the first end of a range must be less",
    "learning_rate:log(0..1)": "the ends of a log range must be greater than 0",
    "learning_rate:(0.1..0.3)": "--learning_rate=(0.1: a number is needed",
}


@pytest.mark.parametrize("text, message", MESSAGES.items())
def test_a_bad_vary_gets_one_line(text, message):
    assert message in refusal(f"--vary={text}")


def test_a_sweep_varies_something_and_each_flag_once():
    assert "--vary=learning_rate:0.05,0.1,0.2" in refusal()
    assert "--vary=seed:... is given twice" in refusal("--vary=seed:1", "--vary=seed:2")
    assert "num_towers" in refusal("--vary=num_gpus:1", "--vary=num_towers:2")


def test_vary_may_stand_in_a_flagfile_and_flags_be_whole_only_together(tmp_path):
    path = tmp_path / "sweep.cfg"
    path.write_text("--batch_size=8\n--vary=seed:1,2\n--vary=model_args:a=1,b=2;a=2,b=2\n")
    runs = plan_of(f"--flagfile={path}", "--vary", "momentum:0,0.9")
    assert len(runs) == 8 and {run.options.batch_size for run in runs} == {8}
    assert list(runs[0].flags) == ["seed", "model_args", "momentum"]
    runs = plan_of("--schedule=step", "--vary=decay_epochs:80,120;60,90")
    assert [run.options.decay_epochs for run in runs] == ["80,120", "60,90"]


def test_a_grid_is_all_combinations():
    runs = plan_of("--batch_size=8", "--vary=learning_rate:0.05,0.1", "--vary=seed:1,2,3")
    assert [run.name for run in runs] == [
        f"learning_rate={rate},seed={seed}" for rate in ("0.05", "0.1") for seed in (1, 2, 3)
    ]
    assert runs[1].options == Options(
        learning_rate=0.05, seed=2, batch_size=8, train_dir="S/learning_rate=0.05,seed=2"
    )


def test_samples_are_the_same_after_a_restart_and_more_keep_the_first():
    argv = ["--vary=learning_rate:log(0.01..0.3)", "--vary=batch_size:16..256", "--vary=seed:1,2"]
    first = plan_of(*argv, "--samples=5")
    assert plan_of(*argv, "--samples=5") == first
    assert plan_of(*argv, "--samples=50")[:5] == first
    assert plan_of(*argv, "--samples=5", "--seed=7")[0].flags == first[0].flags


def test_samples_differ_and_there_must_be_so_many():
    varied = [parse("seed:1,2,3"), parse("batch_size:1..2")]
    assert len({describe(combination) for combination in sample(varied, 6)}) == 6
    assert {describe(c) for c in sample(varied, 6)} == {
        f"batch_size={size},seed={seed}" for size in (1, 2) for seed in (1, 2, 3)
    }
    with pytest.raises(InputError, match="--samples=7: only 6 different .* or --samples=6"):
        sample(varied, 7)


def test_draws_are_even_in_their_range_or_its_logarithm():
    for text, where, value in (
        ("learning_rate:log(0.01..1)", 0.5, 0.1),
        ("momentum:0.2..0.8", 0.5, 0.5),
        ("batch_size:16..19", 0.99, 19),
        ("seed:4,5", 0.5, 5),
    ):
        assert parse(text).draw(where) == value


@settings(deadline=None)
@given(
    low=st.floats(1e-9, 1e9),
    factor=st.floats(1.001, 1e6),
    where=st.floats(0, 1, exclude_max=True),
    log=st.booleans(),
)
def test_a_draw_stays_in_its_range(low, factor, where, log):
    varied = Varied("learning_rate", low=low, high=low * factor, log=log)
    assert low <= varied.draw(where) <= low * factor
    whole = Varied("batch_size", low=int(low) + 1, high=int(low * factor) + 2, log=log)
    assert whole.low <= whole.draw(where) <= whole.high and isinstance(whole.draw(where), int)


def test_names_do_not_depend_on_how_flags_are_given():
    left = plan_of("--vary=seed:1", "--vary=weight_decay:1e-4", "--vary=learning_rate:0.10")
    right = plan_of("--vary=learning_rate:.1", "--vary=weight_decay:0.0001", "--vary=seed:1")
    assert left[0].name == right[0].name == "learning_rate=0.1,weight_decay=0.0001,seed=1"


TEXTS = st.text(st.characters(codec="utf-8"), max_size=300)


@settings(deadline=None, max_examples=30)
@given(left=TEXTS, right=TEXTS)
def test_names_are_safe_short_and_different(left, right):
    names = [name_of({"model_args": value, "seed": 3}) for value in (left, right)]
    for name in names:
        assert re.fullmatch(r"[a-z][A-Za-z0-9_.=,+-]*", name) and len(name) <= MAX_NAME
    assert (names[0] == names[1]) == (left == right)
