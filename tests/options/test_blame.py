"""Whose code raised an error: the user's innermost line, whatever library raised below it."""

import importlib
import sys

import pytest

from towers.options.blame import blame

NAMED = {"model": "net:build", "dataset": "pack.data:load"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Stand in a folder of modules, with installed ones in it, which are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    for path in tmp_path / "lib/python3/site-packages", tmp_path:
        monkeypatch.syspath_prepend(path)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def raised_in(module, named=NAMED):
    """Import a module, call its f, and return the line about what is raised."""
    try:
        importlib.import_module(module).f()
    except Exception as error:
        return blame(error.with_traceback(error.__traceback__.tb_next), named)  # not of the test


@pytest.mark.parametrize(
    "text, where",
    [
        ("1 / 0", "line 1, in <module>: your own code (--model=net:build)"),
        ("def f(:", "line 1: your own code (--model=net:build)"),
        ("import json\ndef f():\n    json.loads('x')", "line 3, in f: your own code"),
        ("import other\ndef f():\n    other.g({})", "line 3, in f: your own code"),
        ("class A:\n    def g(self): 1 / 0\ndef f():\n    A().g()", "line 2, in g: your own code"),
    ],
)
def test_the_users_innermost_line_is_named(folder, text, where):
    write(folder, "net.py", text)
    write(folder, "lib/python3/site-packages/other.py", "def g(x):\n    x['a']\n")
    assert raised_in("net").startswith(f"the error comes from net.py, {where}")


def test_what_is_not_named_by_a_flag_is_the_users_too(folder):
    write(folder, "net.py", "import helper\ndef f():\n    helper.g()\n")
    write(folder, "helper.py", "def g():\n    1 / 0\n")
    assert raised_in("net") == "the error comes from helper.py, line 2, in g: your own code"


def test_a_package_that_is_installed_is_the_users_if_a_flag_names_it(folder):
    path = "lib/python3/site-packages/pack"
    write(folder, f"{path}/__init__.py", "")
    write(folder, f"{path}/data.py", "def f():\n    1 / 0\n")
    assert raised_in("pack.data") == (
        f"the error comes from {path}/data.py, line 2, in f: your own code "
        "(--dataset=pack.data:load)"
    )
    assert raised_in("pack.data", {}).startswith("the error comes from a library: none of your own")


def test_an_error_of_towers_is_to_be_reported(folder):
    path = "lib/python3/site-packages/other.py"
    write(folder, path, "import towers.text as t\ndef f():\n    t.cut(3, 4)\n")
    line = raised_in("other")
    assert "/towers/text.py, line " in line and ", in cut: none of your own code; please" in line
