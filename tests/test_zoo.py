"""The zoo: small models as strangers write them, and whether verify says the truth about each.

A normal run tries a few of them, scripts/test --all each.
"""

from collections import Counter

import pytest

from tests import programs, zoo
from towers import cli
from towers.builder import device_names
from towers.options.functions import load_function

pytestmark = pytest.mark.run


# TensorFlow keeps some memory of every graph that a process traces: 1.3 GiB of a ResNet-50 that is
# verified. These are verified in processes of their own.
LARGE = ("applications:",)


# Models of verdicts that test_verify, test_verify_fit and builder/test_trials do not find.
USUAL = (
    "faults:added_spread", "faults:counts_its_calls", "faults:quantized", "mixing:kernel_clipped",
    "faults:tensorflow_variable",
)  # fmt: skip


def tried(entries):
    """Return parameters: entries, the usual ones of which a normal run tries, too."""
    extended, process = ([getattr(pytest.mark, name)] for name in ("extended", "process"))
    return [
        pytest.param(
            e, id=e.name,
            marks=extended * (e.name not in USUAL) + process * e.name.startswith(LARGE),
        )
        for e in entries
    ]  # fmt: skip


def found(capsys, entry, num_towers):
    command = [*entry.command(), f"--num_towers={num_towers}"]
    if entry.name.startswith(LARGE):
        run = programs.python("-m", "towers", *command)
        return zoo.found(run.returncode, run.stdout, run.stderr)[0]
    return zoo.found(cli.main(command), *capsys.readouterr())[0]


@pytest.mark.timeout(1500)  # of a large application
@pytest.mark.parametrize("entry", tried(zoo.ENTRIES))
def test_verify_says_the_truth(capsys, entry):
    assert found(capsys, entry, 2 if entry.quick else 3) == entry.expected


ON_GPUS = ("added_divergence", "batch_norm_after_dropout", "embedding", "counter")


@pytest.mark.parametrize(
    "entry", tried(e for e in zoo.ENTRIES if any(name in e.name for name in ON_GPUS))
)
def test_verify_says_the_truth_of_gpus(capsys, monkeypatch, entry):
    """Logical CPUs go the ways of GPUs, against a CPU as such."""
    monkeypatch.setenv(device_names.SWITCH, "1")
    assert found(capsys, entry, 2) == entry.expected


@pytest.mark.unit
def test_the_catalogue_is_well_formed():
    names = Counter(entry.name for entry in zoo.ENTRIES)
    assert [name for name, number in names.items() if number > 1] == []
    assert len(names) >= 100
    for entries in zoo.ENTRIES, [entry for entry in zoo.ENTRIES if entry.quick]:
        assert {entry.expected for entry in entries} == {zoo.SAME, zoo.REFUSED, *zoo.CAUSES}
    for entry in zoo.ENTRIES:
        assert callable(load_function("model", f"{zoo.MODULES}.{entry.model}"))
        assert callable(load_function("dataset", entry.dataset))
        assert entry.why
