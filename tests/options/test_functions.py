"""Functions that options name, or that a program gives: found, or refused in one line."""

import copy
import dataclasses
import inspect
import json
import pathlib
import sys

import pytest

from tests import runs
from towers.options import functions
from towers.options.functions import load_function
from towers.options.run import Options

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("modules")]


def refusal(name, flag="model"):
    return runs.refusal(load_function, flag, name)


def test_a_function_of_a_module(write):
    write("net.py", "class Net:\n    pass\nbuild = lambda: 'built'\n_private = build\n")
    write("deep/__init__.py")
    write("deep/er/net.py", "def build():\n    return 'built'\n")
    for name in ("net:_private", "deep.er.net:build"):
        assert load_function("model", name)() == "built"
    assert load_function("model", "net:Net").__name__ == "Net"
    assert load_function("dataset", "json:dumps") is json.dumps


@pytest.mark.parametrize(
    "flag, name, says",
    [
        *(("model", name, "must be module:function, such as my_net:build")
          for name in ("net:", ":build", "a..b:c", "net.:build", "", "net", "net.py:build")),
        *(("dataset", name, f"there is no module {name[:-2]} in")
          for name in ("no_net:b", "net.a.b:b", "a/net:b", "a\0b:b")),
        ("callbacks", "net:LIST", "net has no function LIST"),
        ("model", "net:resnet", "net has no function resnet; did you mean net:resnet20?"),
    ],
)  # fmt: skip
def test_a_name_of_no_function_is_one_line(write, flag, name, says):
    write("net.py", "resnet20 = print\nLIST = []\n")
    said = refusal(name, flag)
    assert said.startswith(f"--{flag}={name}") and says in said


@pytest.fixture
def away(monkeypatch):
    """Let the checkout not be on the search path, and its models not be imported."""
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(functions._CHECKOUT)])
    for name in [n for n in sys.modules if n.partition(".")[0] in ("models", "towers_models")]:
        monkeypatch.delitem(sys.modules, name)


def test_the_shipped_models_are_those_of_the_checkout(write, modules, away, monkeypatch):
    before = list(sys.path)
    for path in "models/__init__.py", "models/parts.py", "models/resnet.py", "towers_models.py":
        write(path, "raise SystemExit('a stranger')\ndef resnet(): ...")
    for name in "models.resnet:resnet20", "models.resnet:resnet", "models.vit:vit":
        assert functions.is_shipped(name)
        file = inspect.getsourcefile(load_function("model", name))
        assert file == str(functions._CHECKOUT / f"{name.partition(':')[0].replace('.', '/')}.py")
    assert functions.shadowing_file("models.resnet:resnet") == "models/resnet.py"
    assert not functions.shadowing_file("models.vit:vit")
    assert sys.path == before and "models" not in sys.modules
    monkeypatch.setattr(functions, "_CHECKOUT", modules / "none")  # installed without a checkout
    (modules / "models/__init__.py").unlink()
    assert not functions.is_shipped("models.resnet:resnet")


def test_the_current_folder_is_searched_for_what_was_named_and_after_pythons_own(
    write, folder, monkeypatch
):
    installed = [p for p in sys.path if p != str(folder)]
    monkeypatch.setattr(sys, "path", list(installed))
    write("secrets.py", "raise SystemExit('a stranger')")  # of Python
    write("mine_too.py", "value = 3")
    write("net.py", "import secrets\ndef build(): import mine_too; return mine_too")
    monkeypatch.delitem(sys.modules, "secrets", raising=False)
    load_function("loss", "json:dumps")
    assert sys.path == installed
    assert load_function("model", "net:build")().value == 3
    assert sys.path == [*installed, str(folder)]  # its functions may import others


def test_a_function_that_is_called_without_arguments_needs_none(folder):
    assert functions.call_without_arguments("dataset", "os:getcwd") == str(folder)
    said = runs.refusal(functions.call_without_arguments, "optimizer", "math:sin")
    assert said.startswith("--optimizer=math:sin is called without arguments, but")


# What a program gives in place of names: options stay texts, and each has its own functions.


def build():
    return "built"


def local(value):
    def build():
        return value

    return build


def test_a_function_that_an_import_finds_has_its_own_name():
    for function in (build, json.dumps, pathlib.Path):
        name = Options(model=function).model
        assert name == f"{function.__module__}:{function.__name__}"
        assert load_function("model", str(name)) is function  # by anybody


def test_two_functions_of_one_name_are_not_mixed_up():
    one, two = Options(model=local(1)), Options(model=local(2), dataset=local(3))
    again = dataclasses.replace(one, seed=1)
    copied = copy.deepcopy(one)
    assert [load_function("model", o.model)() for o in (one, two, again, copied)] == [1, 2, 1, 1]
    assert load_function("dataset", two.dataset)() == 3


def test_data_is_what_a_function_would_return():
    halves = ([1], [2]), ([3], [4])
    for data in halves, {"train": halves[0], "test": halves[1]}:
        options = Options(dataset=data)
        assert options.dataset == "given_in_python:data"
        assert load_function("dataset", options.dataset)() is data
        assert "--dataset=given_in_python:data" in options.to_flagfile().splitlines()
    assert Options(dataset=local(halves)).dataset == "given_in_python:build"


def test_a_list_is_its_items_with_commas_and_a_folder_may_be_a_path(tmp_path):
    assert Options(devices=["/gpu:0", "/gpu:2"]).devices == "/gpu:0,/gpu:2"
    assert Options(decay_epochs=(80, 120.5)).decay_epochs == "80,120.5"
    assert Options(model_args=["a=1", "b=2"]).model_args == "a=1,b=2"
    assert Options(train_dir=tmp_path).train_dir == str(tmp_path)
