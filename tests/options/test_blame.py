"""Whose code raised an error: the user's innermost line, whatever library raised below it."""

import importlib

import pytest

from towers.options.blame import blame

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("modules")]

INSTALLED = "lib/python3/site-packages"
NAMED = {"model": "net:build", "dataset": "pack.data:load"}


def raised_in(module, named=NAMED):
    """Import a module, call its f, and return the line about what is raised."""
    try:
        importlib.import_module(module).f()
    except Exception as error:
        return blame(error.with_traceback(error.__traceback__.tb_next), named)  # not of the test


@pytest.mark.parametrize(
    "text, where",
    [
        ("1 / 0", "net.py, line 1, in <module>: your own code (--model=net:build)"),
        ("def f(:", "net.py, line 1: your own code (--model=net:build)"),
        ("import json\ndef f():\n    json.loads('x')", "net.py, line 3, in f: your own code ("),
        ("import other\ndef f():\n    other.g({})", "net.py, line 3, in f: your own code ("),
        ("class A:\n    def g(self): 1 / 0\ndef f():\n    A().g()", "net.py, line 2, in g: your o"),
        ("import helper\ndef f():\n    helper.g()\n", "helper.py, line 2, in g: your own code"),
    ],
)
def test_the_users_innermost_line_is_named(write, text, where):
    write("net.py", text)
    write("helper.py", "def g():\n    1 / 0\n")  # which no flag names
    write(f"{INSTALLED}/other.py", "def g(x):\n    x['a']\n")
    line = raised_in("net")
    assert line.startswith(f"the error comes from {where}")
    assert ("(--model=net:build)" in line) == where.startswith("net.py")


def test_a_package_that_is_installed_is_the_users_if_a_flag_names_it(write):
    path = f"{INSTALLED}/pack"
    write(f"{path}/__init__.py")
    write(f"{path}/data.py", "def f():\n    1 / 0\n")
    where = f"the error comes from {path}/data.py, line 2, in f: your own code"
    assert raised_in("pack.data") == f"{where} (--dataset=pack.data:load)"
    assert raised_in("pack.data", {}).startswith("the error comes from a library: none of your own")


def test_an_error_of_towers_is_to_be_reported(write):
    write(f"{INSTALLED}/other.py", "import towers.text as t\ndef f():\n    t.cut(3, 4)\n")
    line = raised_in("other")
    assert "/towers/text.py, line " in line and ", in cut: none of your own code; please" in line


@pytest.mark.parametrize("call", ["Sequential.call()", "Dense.call()", "Functional.call()"])
def test_what_keras_own_layers_raise_need_not_be_the_towers(write, call):
    text = f"def f():\n    raise ValueError('Exception encountered when calling {call}.')\n"
    write(f"{INSTALLED}/other.py", text)
    line = raised_in("other")
    assert f"comes from Keras' own {call.partition('.')[0]}: " in line
    assert "if `model.fit` fails alike without towers" in line
