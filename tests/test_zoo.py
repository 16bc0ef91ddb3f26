"""The zoo: small models as strangers write them, and whether verify says the truth about each."""

from collections import Counter

import pytest

from tests import zoo
from tests.zoo import entry as entries
from towers import cli
from towers.options.functions import load_function

QUICK = [entry for entry in zoo.ENTRIES if entry.quick]


@pytest.mark.parametrize("entry", QUICK, ids=lambda entry: entry.name)
def test_verify_says_the_truth(capsys, entry):
    code = cli.main(entry.command())
    found, _ = zoo.found(code, *capsys.readouterr())
    assert found == entry.expected


def test_the_table_is_well_formed():
    names = Counter(entry.name for entry in zoo.ENTRIES)
    assert [name for name, number in names.items() if number > 1] == []
    assert len(names) >= 60
    assert zoo.quick_names() <= set(names)
    expected = Counter(entry.expected for entry in zoo.ENTRIES)
    assert set(expected) == {zoo.SAME, zoo.REFUSED, *zoo.CAUSES}
    assert [key for key, number in expected.items() if number < 2] == []
    for entry in zoo.ENTRIES:
        assert callable(load_function("model", f"{entries.MODULES}.{entry.model}"))
        assert callable(load_function("dataset", entry.dataset))
        assert entry.why
