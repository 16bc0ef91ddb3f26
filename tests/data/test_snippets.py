"""The data functions that the page of towers/data shows: each runs as it is written there."""

import re

import numpy as np
import pytest

from tests.data.splits import all_of
from tests.programs import ROOT

pytestmark = pytest.mark.unit


def snippet(name):
    """Return the code block of the page that begins with the name of a file."""
    page = (ROOT / "towers/data/README.md").read_text(encoding="utf-8")
    return re.search(rf"```python\n(# {name}\n.*?)```", page, re.DOTALL)[1]


def load_of(name):
    exec(snippet(name), names := {})
    return names["load"]


def test_a_table_with_a_column_of_texts(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"{i},{['Oslo', 'Rome'][i % 2]},{i}.5" for i in range(20)]
    (tmp_path / "prices.csv").write_text("\n".join(["area,city,price", *rows]))
    found = load(load_of("my_prices.py"))
    assert (found.train.size, found.test.size, found.num_classes) == (18, 2, 0)
    x, y = map(np.concatenate, zip(all_of(found.train), all_of(found.test), strict=True))
    order, area = np.argsort(y), np.arange(20)
    assert x[order].tolist() == np.stack([area, area % 2 == 0, area % 2], 1).tolist()
    assert y[order].tolist() == (area + 0.5).tolist()
