"""The zoo: small models as strangers write them, and whether verify says the truth about each.

A normal run tries some quick models of verdicts that test_verify and test_verify_fit do not find;
what is extended are all.
"""

from collections import Counter

import pytest

from tests import programs, zoo
from towers import cli
from towers.builder import device_types
from towers.options.functions import load_function

pytestmark = pytest.mark.run


# TensorFlow keeps some memory of every graph that a process traces: 1.3 GiB of a ResNet-50 that is
# verified. These are verified in processes of their own.
LARGE = ("applications:", "families:")


def tried(entries, usual):
    """Return parameters: entries, the usual ones of which a normal run tries, too."""
    usual_or_not = {True: [], False: [pytest.mark.extended]}
    own_process = {True: [pytest.mark.process], False: []}
    return [
        pytest.param(
            e, marks=usual_or_not[usual(e)] + own_process[e.name.startswith(LARGE)], id=e.name
        )
        for e in entries
    ]


def found(capsys, entry, num_towers):
    command = [*entry.command(), f"--num_towers={num_towers}"]
    if entry.name.startswith(LARGE):
        run = programs.python("-m", "towers", *command)
        return zoo.found(run.returncode, run.stdout, run.stderr)[0]
    return zoo.found(cli.main(command), *capsys.readouterr())[0]


ELSEWHERE = ("random op", "mixed examples", "local BatchNorm", "batch size")
RARELY = (  # for `scripts/test --all` alone
    "refused:batch_norm_in_cond", "programs:added_divergence", "faults:noise_by_numpy_function",
    "faults:square_draw", "faults:seed_by_its_name", "faults:projection_that_stays",
    "mixing:place_as_feature", "state:last_example",  # as builder/test_trials has them
)  # fmt: skip


@pytest.mark.timeout(1500)  # of a large application
@pytest.mark.parametrize(
    "entry",
    tried(
        zoo.ENTRIES,
        lambda e: e.quick and e.expected not in ELSEWHERE and e.name not in RARELY,
    ),
)
def test_verify_says_the_truth(capsys, entry):
    assert found(capsys, entry, 2 if entry.quick else 3) == entry.expected


ON_GPUS = ("added_divergence", "batch_norm_after_dropout", "embedding", "counter")


@pytest.mark.parametrize(
    "entry",
    tried(
        [e for e in zoo.ENTRIES if any(name in e.name for name in ON_GPUS)],
        lambda e: e.name == "norms:batch_norm_after_dropout",
    ),
)
def test_verify_says_the_truth_of_gpus(capsys, monkeypatch, entry):
    """Logical CPUs go the ways of GPUs, against a CPU as such."""
    monkeypatch.setenv(device_types.SWITCH, "1")
    assert found(capsys, entry, 2) == entry.expected


@pytest.mark.unit
def test_the_catalogue_is_well_formed():
    names = Counter(entry.name for entry in zoo.ENTRIES)
    assert [name for name, number in names.items() if number > 1] == []
    assert len(names) >= 160
    for entries in zoo.ENTRIES, [entry for entry in zoo.ENTRIES if entry.quick]:
        assert {entry.expected for entry in entries} == {zoo.SAME, zoo.REFUSED, *zoo.CAUSES}
    for entry in zoo.ENTRIES:
        assert callable(load_function("model", f"{zoo.MODULES}.{entry.model}"))
        assert callable(load_function("dataset", entry.dataset))
        assert entry.why
