"""When things are due, by a walk through the run as the train loop makes it."""

import pytest

from towers.options.parts import DueOptions
from towers.options.run import Options
from towers.options.triggers import Timetable

pytestmark = pytest.mark.unit

KINDS = ("logs", "saves", "evaluates", "draws_histograms")


def timetable(first=0, last=100, size=1000, **options):
    options = Options(**{"batch_size": 100, "log_every_steps": 100} | options)
    sizes = size, options.batch_size, options.steps_per_loop
    return Timetable(first, first * options.batch_size, last, *sizes, options)


def walk(plan):
    """Return the steps at which the loop stops, and {kind: steps at which that is done}."""
    step, stops, done = plan.first_step, [], {kind: [] for kind in KINDS}
    while step < plan.last_step:
        step += plan.num_steps(step)
        stops.append(step)
        for kind, steps in done.items():
            if getattr(plan, kind)(step):
                steps.append(step)
    assert step == plan.last_step
    return stops, done


@pytest.mark.parametrize(
    "given, logs, saves, evaluates",
    [
        # 10 steps an epoch; a line shows the number of updates before its step.
        (dict(last=30), [1, 30], [], [10, 20]),
        (dict(last=20, log_every_steps=8, checkpoint_every_steps=6), [1, 9, 17, 20], [6, 12, 18],
         [10]),
        (dict(last=25, evaluate_every_epochs=0.55), [1, 25], [], [6, 11, 17, 22]),
        (dict(last=12, size=250, evaluate_every_epochs=1), [1, 12], [], [3, 5, 8, 10]),
        (dict(last=30, size=10, batch_size=1, evaluate_every_epochs=1.1), [1, 30], [], [11, 22]),
        (dict(last=30, evaluate_every_epochs=0, checkpoint_every_steps=0), [1, 30], [], []),
        (dict(last=1), [1], [], []),
    ],
)  # fmt: skip
def test_everything_that_is_due_is_done_once_and_nothing_else(given, logs, saves, evaluates):
    for steps_per_loop in 1, 7, 10**9:
        stops, done = walk(timetable(steps_per_loop=steps_per_loop, **given))
        assert stops[0] == 1  # a run that cannot work fails early
        assert (done["logs"], done["saves"], done["evaluates"]) == (logs, saves, evaluates)
        assert max(b - a for a, b in zip([0, *stops], stops, strict=False)) <= steps_per_loop


def test_a_run_that_is_continued_does_the_same_from_there():
    given = dict(last=40, size=730, evaluate_every_epochs=0.7, checkpoint_every_steps=7)
    _, whole = walk(timetable(log_every_steps=9, histogram_every_epochs=1, **given))
    for step in range(1, 39):
        _, rest = walk(timetable(step, log_every_steps=9, histogram_every_epochs=1, **given))
        for kind in KINDS[1:]:
            assert rest[kind] == [n for n in whole[kind] if n > step]
        assert {step + 1, *(n for n in whole["logs"] if n > step)} == set(rest["logs"])


@pytest.mark.parametrize("last, points", [(7, 7), (60, 21), (938, 22), (5000, 51)])
def test_a_short_run_has_at_least_20_points_if_it_is_long_enough(last, points):
    timetable = Timetable(0, 0, last, 100, 10, 10, DueOptions())
    assert sum(map(timetable.plots, range(1, last + 1))) == points
