"""Functions named as module:function: found, or refused in one line."""

import json
import sys

import pytest

from towers.errors import InputError
from towers.options.functions import load_function


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder on the search path, whose modules are forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder, name, text=""):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def refusal(name, flag="model"):
    with pytest.raises(InputError) as error:
        load_function(flag, name)
    return str(error.value)


def test_a_function_of_a_module(folder):
    write(folder, "net.py", "class Net:\n    pass\nbuild = lambda: 'built'\n_private = build\n")
    write(folder, "deep/__init__.py")
    write(folder, "deep/er/net.py", "def build():\n    return 'built'\n")
    for name in ("net:build", "net:_private", "deep.er.net:build"):
        assert load_function("model", name)() == "built"
    assert load_function("model", "net:Net").__name__ == "Net"
    assert load_function("dataset", "json:dumps") is json.dumps


def test_the_form_of_a_name(folder):
    write(folder, "net.py", "def build():\n    pass\n")
    for name in "net net: :build : net.build .net:build a..b:c net.:build".split() + [""]:
        for flag in ("model", "dataset"):
            message = f"--{flag}={name} must be module:function, such as models.cnn:cnn"
            assert refusal(name, flag) == message


@pytest.mark.parametrize(
    "name",
    ["no_net:build", "no_net.a.b:c", "net.a:build", "net.a.b:build", "a/net.py:build", "a b:c"]
    + ["pack.no:build", "pack.net.no:build", "a\0b:c"],
)
def test_a_module_that_is_not_there(folder, name):
    write(folder, "net.py")
    write(folder, "pack/__init__.py")
    write(folder, "pack/net.py")
    module = name.partition(":")[0]
    assert refusal(name, "dataset").startswith(f"--dataset={name}: there is no module {module} in")


@pytest.mark.parametrize(
    "text, error",
    [
        ("import no_such_dependency", "No module named 'no_such_dependency'"),
        ("import net_.no", "No module named 'net_'"),
        ("raise ValueError('theirs')", "theirs"),
        ("def build(:", "invalid syntax"),
        ("1 / 0", "division by zero"),
    ],
)
@pytest.mark.parametrize("path, name", [("net.py", "net:f"), ("net/__init__.py", "net.sub:f")])
def test_what_a_module_raises_comes_through(folder, text, error, path, name):
    write(folder, path, text)
    with pytest.raises(Exception, match=error) as raised:
        load_function("model", name)
    assert not isinstance(raised.value, InputError)


def test_a_function_that_is_not_there(folder):
    write(folder, "net.py", "class A:\n    b = print\nresnet20 = A\n_resnet = A\nresnet = 20\n")
    assert refusal("net:resnet21") == (
        "--model=net:resnet21: net has no function resnet21; did you mean net:resnet20?"
    )
    assert refusal("net:resnet") == (
        "--model=net:resnet: net has no function resnet; did you mean net:resnet20?"
    )
    for name in ("xyz", "A.bcd", "::::"):
        assert refusal(f"net:{name}") == f"--model=net:{name}: net has no function {name}"
