"""Tables of text."""

import pytest
import tensorflow as tf

from towers.formatting import cut, figure, first_line, table

pytestmark = pytest.mark.unit


def test_tables_keep_their_columns():
    assert table(["rate", "n"], [[0.1, 2], [0.05, None]]) == ["rate  n", " 0.1  2", "0.05  -"]
    assert table(["name", "n"], [["a", 10], ["long", 2]]) == ["name   n", "a     10", "long   2"]
    assert table(["name"], []) == ["name"]
    shown = {0.0: "0.0000", 2.306: "2.3060", -41.5: "-41.5000", 1.25e-5: "1.25e-05"}
    shown |= {410224525312.0: "4.102e+11", float("nan"): "nan", float("inf"): "inf"}
    assert [figure(value) for value in shown] == list(shown.values())
    assert figure(0.00160, 5) == "0.00160" and figure(1e-6, 5) == "1e-06"
    assert cut("0123456789", 7) == "01...89" and cut("0123456", 7) == "0123456"


def test_the_reason_is_found_within_what_tensorflow_puts_around_it():
    message = (
        "Graph execution error:\n\nDetected at node StatefulPartitionedCall defined at (most "
        'recent call last):\n  File "a.py", line 3, in <module>\n\n<stack traces unavailable>\n'
        "2 root error(s) found.\n  (0) INTERNAL:  libdevice not found at ./libdevice.10.bc\n"
        "\t [[{{node StatefulPartitionedCall}}]]\n"
    )
    error = tf.errors.InternalError(None, None, message)
    assert first_line(error) == "libdevice not found at ./libdevice.10.bc"
    assert first_line(tf.errors.InternalError(None, None, "")) == "InternalError"
