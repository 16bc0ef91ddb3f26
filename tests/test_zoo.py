"""The zoo: small models as strangers write them, and whether verify says the truth about each.

A normal run tries a model of each verdict that test_verify and test_verify_fit do not find; what is
extended are all.
"""

from collections import Counter

import pytest

from tests import zoo
from towers import cli
from towers.builder import kinds
from towers.options.functions import load_function

pytestmark = pytest.mark.run


def tried(entries, usual):
    """Return parameters: entries, the usual ones of which a normal run tries, too."""
    marks = {True: [], False: [pytest.mark.extended]}
    return [pytest.param(e, marks=marks[usual(e)], id=e.name) for e in entries]


def found(capsys, entry, num_towers):
    code = cli.main([*entry.command(), f"--num_towers={num_towers}"])
    return zoo.found(code, *capsys.readouterr())[0]


ELSEWHERE = ("random op", "mixed examples", "local BatchNorm", "batch size")


@pytest.mark.timeout(1500)  # of a large application
@pytest.mark.parametrize(
    "entry", tried(zoo.ENTRIES, lambda e: e.quick and e.expected not in ELSEWHERE)
)
def test_verify_says_the_truth(capsys, entry):
    assert found(capsys, entry, 3) == entry.expected


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
    monkeypatch.setenv(kinds.SWITCH, "1")
    assert found(capsys, entry, 2) == entry.expected


@pytest.mark.unit
def test_the_catalogue_is_well_formed():
    names = Counter(entry.name for entry in zoo.ENTRIES)
    assert [name for name, number in names.items() if number > 1] == []
    assert len(names) >= 170
    for entries in zoo.ENTRIES, [entry for entry in zoo.ENTRIES if entry.quick]:
        assert {entry.expected for entry in entries} == {zoo.SAME, zoo.REFUSED, *zoo.CAUSES}
    for entry in zoo.ENTRIES:
        assert callable(load_function("model", f"{zoo.MODULES}.{entry.model}"))
        assert callable(load_function("dataset", entry.dataset))
        assert entry.why
