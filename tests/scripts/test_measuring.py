"""Scripts that measure or compare, on the tiniest input: their tables, and what they compare."""

import pytest

from tests.programs import ROOT, TENSORFLOWS_LINES, python

pytestmark = pytest.mark.process
TEXTS = {path: path.read_text() for path in (ROOT / "scripts").glob("*.py")}
SCRIPTS = sorted(p.name for p, text in TEXTS.items() if "tensorflow" in text and "__main__" in text)


@pytest.mark.extended
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_starts_without_tensorflows_lines(name):
    """Of one that is run, tests/graphs/test_placement.py looks at the lines."""
    done = python(f"scripts/{name}", "--help")
    assert done.returncode == 0 and done.stdout
    assert not TENSORFLOWS_LINES.search(done.stderr), done.stderr


# Beside what others do.


@pytest.mark.extended
def test_towers_have_none_of_the_three_faults_of_mirrored_strategy():
    done = python("scripts/mirrored_faults.py")
    assert done.returncode == 0, done.stderr
    header, updates, weights, variances = [line.split() for line in done.stdout.splitlines()]
    assert header == ["one", "device", "2", "towers", "MirroredStrategy"]
    assert updates[-3:] == ["1.0000", "1.0000", "1.4142"]
    assert weights[-6:] == ["0", "0", "0", "0", "nan", "nan"]
    assert variances[-3:] == ["1", "1", "0"]
