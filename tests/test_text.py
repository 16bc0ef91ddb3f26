"""Tables of text."""

import pytest

from towers.text import cut, table

pytestmark = pytest.mark.unit


def test_tables_keep_their_columns():
    assert table(["rate", "n"], [[0.1, 2], [0.05, None]]) == ["rate  n", " 0.1  2", "0.05  -"]
    assert table(["name", "n"], [["a", 10], ["long", 2]]) == ["name   n", "a     10", "long   2"]
    assert table(["name"], []) == ["name"]
    assert cut("0123456789", 7) == "01...89" and cut("0123456", 7) == "0123456"
