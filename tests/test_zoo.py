"""The zoo: small models as strangers write them, and whether verify says the truth about each."""

from collections import Counter

import pytest

from tests import zoo
from towers import cli
from towers.builder import kinds
from towers.options.functions import load_function


@pytest.mark.parametrize("entry", [e for e in zoo.ENTRIES if e.quick], ids=lambda e: e.name)
def test_verify_says_the_truth(capsys, entry):
    code = cli.main([*entry.command(), "--num_towers=3"])
    found, _ = zoo.found(code, *capsys.readouterr())
    assert found == entry.expected


ON_GPUS = ("added_divergence", "batch_norm_after_dropout", "embedding", "stateful", "counter")


@pytest.mark.parametrize(
    "entry", [e for e in zoo.ENTRIES if any(n in e.name for n in ON_GPUS)][:7], ids=lambda e: e.name
)
def test_verify_says_the_truth_of_gpus(capsys, monkeypatch, entry):
    """Logical CPUs go the ways of GPUs, against a CPU as such."""
    monkeypatch.setenv(kinds.SWITCH, "1")
    code = cli.main([*entry.command(), "--num_towers=2"])
    found, _ = zoo.found(code, *capsys.readouterr())
    assert found == entry.expected


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
