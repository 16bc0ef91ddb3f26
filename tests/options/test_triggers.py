"""When things are due, by a walk through the run as the train loop makes it."""

from fractions import Fraction

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from towers.options.run import Options
from towers.options.triggers import Timetable

pytestmark = pytest.mark.unit

KINDS = ("logs", "saves", "evaluates", "draws_histograms")


def timetable(first=0, first_examples=None, last=100, size=1000, **options):
    options = Options(**{"batch_size": 100, **options})
    if first_examples is None:
        first_examples = first * options.batch_size
    return Timetable(
        first, first_examples, last, size, options.batch_size, options.steps_per_loop, options
    )


def walk(plan):
    """Return the steps at which the loop stops, and {kind: steps at which that is done}."""
    step, stops, done = plan.first_step, [], {kind: [] for kind in KINDS}
    while step < plan.last_step:
        num_steps = plan.num_steps(step)
        assert 1 <= num_steps <= plan.steps_per_loop
        step += num_steps
        stops.append(step)
        for kind, steps in done.items():
            if getattr(plan, kind)(step):
                steps.append(step)
    assert step == plan.last_step
    return stops, done


def due(plan):
    """Return what is due after each step of the run, from the options alone."""
    options, steps = plan.options, range(plan.first_step + 1, plan.last_step + 1)
    result = {kind: [] for kind in KINDS}
    epochs = {"evaluates": options.evaluate_every_epochs}
    epochs["draws_histograms"] = options.histogram_every_epochs
    everies = {kind: Fraction(str(number)) * plan.train_size for kind, number in epochs.items()}
    multiples = {kind: every and plan.first_examples // every for kind, every in everies.items()}
    for step in steps:
        before_update = step - 1
        if before_update % options.log_every_steps == 0 or step in (steps[0], steps[-1]):
            result["logs"].append(step)
        if options.checkpoint_every_steps and step % options.checkpoint_every_steps == 0:
            result["saves"].append(step)
        seen = plan.first_examples + (step - plan.first_step) * options.batch_size
        for kind, every in everies.items():
            if every and (multiples[kind] + 1) * every <= seen:
                result[kind].append(step)
                multiples[kind] = seen // every
    for kind in KINDS[1:]:  # those of the end come apart
        result[kind] = [step for step in result[kind] if step < plan.last_step]
    return result


EPOCHS = st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0, 1.1, 2.0, 2.5]) | st.floats(0.01, 10)
PLANS = st.builds(
    lambda first, steps, **values: timetable(first=first, last=first + steps, **values),
    first=st.integers(0, 50),
    steps=st.integers(1, 100),
    first_examples=st.integers(0, 5000),
    size=st.integers(1, 3000),
    batch_size=st.integers(1, 500),
    steps_per_loop=st.integers(1, 40) | st.just(10**9),
    log_every_steps=st.integers(1, 40),
    evaluate_every_epochs=EPOCHS,
    histogram_every_epochs=EPOCHS,
    checkpoint_every_steps=st.integers(0, 40),
)


@settings(deadline=None, max_examples=200)
@given(PLANS)
@example(timetable(last=30, size=10, batch_size=1, evaluate_every_epochs=1.1))
@example(timetable(last=1))
def test_everything_that_is_due_is_done_once_and_nothing_else(plan):
    stops, done = walk(plan)
    assert stops[0] == plan.first_step + 1
    assert done == due(plan)


@settings(deadline=None)
@given(PLANS, st.data())
def test_a_run_that_is_continued_does_the_same_from_there(plan, data):
    assume(plan.first_step + 1 < plan.last_step)
    step = data.draw(st.integers(plan.first_step + 1, plan.last_step - 1))
    rest = Timetable(**vars(plan) | {"first_step": step, "first_examples": plan.examples(step)})
    whole, after = walk(plan)[1], walk(rest)[1]
    for kind in ("saves", "evaluates"):
        assert after[kind] == [n for n in whole[kind] if n > step]
    first_line = {step + 1}  # one that only the second part has
    assert first_line | {n for n in whole["logs"] if n > step} == set(after["logs"])
