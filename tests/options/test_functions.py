"""Functions named as module:function: found, or refused in one line."""

import inspect
import json
import sys

import pytest

from tests import runs
from towers.errors import InputError
from towers.options import functions
from towers.options.functions import check_function, load_function

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("modules")]


def refusal(name, flag="model"):
    return runs.refusal(load_function, flag, name)


def test_a_function_of_a_module(write):
    write("net.py", "class Net:\n    pass\nbuild = lambda: 'built'\n_private = build\n")
    write("deep/__init__.py")
    write("deep/er/net.py", "def build():\n    return 'built'\n")
    for name in ("net:build", "net:_private", "deep.er.net:build"):
        assert load_function("model", name)() == "built"
    assert load_function("model", "net:Net").__name__ == "Net"
    assert load_function("dataset", "json:dumps") is json.dumps


def test_the_form_of_a_name(write):
    write("net.py", "def build():\n    pass\n")
    for name in "net net: :build : net.build .net:build a..b:c net.:build".split() + [""]:
        for flag in ("model", "dataset"):
            message = f"--{flag}={name} must be module:function, such as models.cnn:cnn"
            assert refusal(name, flag) == message


@pytest.mark.parametrize(
    "name",
    ["no_net:build", "no_net.a.b:c", "net.a:build", "net.a.b:build", "a/net.py:build", "a b:c"]
    + ["pack.no:build", "pack.net.no:build", "a\0b:c"],
)
def test_a_module_that_is_not_there(write, name):
    for path in "net.py", "pack/__init__.py", "pack/net.py":
        write(path)
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
def test_what_a_module_raises_comes_through(write, text, error, path, name):
    write(path, text)
    with pytest.raises(Exception, match=error) as raised:
        load_function("model", name)
    assert not isinstance(raised.value, InputError)


def test_a_function_that_is_not_there(write):
    write("net.py", "class A:\n    b = print\nresnet20 = A\n_resnet = A\nresnet = 20\n")
    for name in "resnet21", "resnet":
        said = f"--model=net:{name}: net has no function {name}; did you mean net:resnet20?"
        assert refusal(f"net:{name}") == said
    for name in ("xyz", "A.bcd", "::::"):
        assert refusal(f"net:{name}") == f"--model=net:{name}: net has no function {name}"


def told(name):
    """Return the message that `check_function` gives without importing anything, or None."""
    before = set(sys.modules)
    try:
        check_function("model", name)
    except InputError as error:
        return str(error)
    finally:
        assert not {m for m in set(sys.modules) - before if m.startswith(("net", "pack", "deep"))}


NET = """
import json as j, os.path
from keras import Model, layers as kl
if True:
    def build(): return inner
    class Net: inner = 1
try:
    a, (b, *c) = 1, (2, 3)
except ImportError:
    from x import y
for d in []: pass
with open("") as e: pass
"""


def test_names_are_read_from_the_source(write):
    write("net.py", NET)
    write("deep/er/net.py", NET)  # packages without __init__
    for name in "build Net a b c d e y j os Model kl".split():
        assert told(f"net:{name}") is told(f"deep.er.net:{name}") is None
    for name in "inner x json path layers".split():
        assert f"net has no function {name}" in told(f"net:{name}")
    assert told("net:bild") == "--model=net:bild: net has no function bild; did you mean net:build?"


@pytest.mark.parametrize(
    "text",
    ["from x import *", "def __getattr__(name): ...", "globals()['build'] = 1", "exec('build = 1')"]
    + ["def make():\n    global build\n    build = 1", "import sys\nsys.modules[__name__] = 1"]
    + ["def build(:", "\0"],
)
def test_what_a_source_does_not_tell_is_left_to_the_import(write, text):
    write("net.py", text)
    assert told("net:build") is None
    write("pack/__init__.py", "__path__.append('elsewhere')")
    assert told("pack.net:build") is None


def test_a_module_that_is_not_there_is_told_before_it_is_imported(write):
    write("net.py")
    write("pack/__init__.py", "1 / 0")
    write("pack/net.py")
    near = {"nett:f": "net:f", "net.py:f": "net:f", "pack.nett:f": "pack.net:f", "net.f:g": "net:g"}
    for name, meant in near.items():
        assert told(name).endswith(f"or the installed packages; did you mean {meant}?")
    assert told("pack.net:f") is None  # an empty file tells nothing
    assert "must be module:function" in told("net")
    assert told("json:dumps") is None and "json has no function f" in told("json:f")


@pytest.fixture
def away(monkeypatch):
    """Let the checkout not be on the search path, and its models not be imported."""
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(functions._CHECKOUT)])
    for name in [n for n in sys.modules if n.partition(".")[0] in ("models", "towers_models")]:
        monkeypatch.delitem(sys.modules, name)


def test_the_shipped_models_are_those_of_the_checkout(write, modules, away, monkeypatch):
    before = list(sys.path)
    assert told("models.cnn:cnn") is None
    assert told("models.cnm:cnn").endswith("did you mean models.cnn:cnn?")
    for path in "models/__init__.py", "models/parts.py", "models/resnet.py", "towers_models.py":
        write(path, "raise SystemExit('a stranger')\ndef resnet(): ...")
    for name in "models.resnet:resnet20", "models.resnet:resnet", "models.vit:vit":
        assert told(name) is None and functions.is_shipped(name)
        file = inspect.getsourcefile(load_function("model", name))
        assert file == str(functions._CHECKOUT / f"{name.partition(':')[0].replace('.', '/')}.py")
    assert functions.namesake("models.resnet:resnet") == "models/resnet.py"
    assert not functions.namesake("models.vit:vit") and not functions.namesake("models.resnet:own")
    assert sys.path == before and "models" not in sys.modules
    monkeypatch.setattr(functions, "_CHECKOUT", modules / "none")  # installed without a checkout
    (modules / "models/__init__.py").unlink()
    assert "type towers init for a model of your own" in told("models.cnm:cnn")
    assert not functions.is_shipped("models.resnet:resnet")


def test_models_of_the_users_own_are_theirs_by_other_names(write, away):
    write("models/mine.py", "def build(): return 'mine'")
    write("models/resnet.py", "def mine(): return 'mine'")
    for name in "models.mine:build", "models.resnet:mine":
        assert told(name) is None and not functions.is_shipped(name)
        assert load_function("model", name)() == "mine"


def test_the_current_folder_is_searched_for_what_was_named_and_after_pythons_own(
    write, folder, monkeypatch
):
    installed = [p for p in sys.path if p != str(folder)]
    monkeypatch.setattr(sys, "path", list(installed))
    for name in "antigravity", "keras_", "secrets", "this":  # of Python, and of nobody
        write(f"{name}.py", "raise SystemExit('a stranger')")
    write("cgitb.py", "import mine_too\ndef build(): return mine_too.value")
    write("mine_too.py", "value = 3")
    write("net.py", "import antigravity_, secrets\ndef build(): import mine_too; return mine_too")
    write("antigravity_.py")
    monkeypatch.delitem(sys.modules, "secrets", raising=False)
    load_function("loss", "json:dumps")
    assert sys.path == installed
    assert "no module keras_x" in refusal("keras_x:y")
    assert load_function("model", "net:build")().value == 3
    assert sys.path == [*installed, str(folder)]  # its functions may import others
    assert load_function("model", "cgitb:build")() == 3  # as the user has named it
    for name in "cgitb", "mine_too", "net", "antigravity_":
        del sys.modules[name]


@pytest.mark.parametrize("name", ["builtins:dict", "time:time", "functools:partial"])
def test_what_does_not_tell_how_it_is_called_is_refused(name):
    for flag in ("model", "dataset", "loss"):
        with pytest.raises(InputError, match=f"^--{flag}={name} does not tell which arguments"):
            load_function(flag, name)


def test_a_function_that_is_called_without_arguments_needs_none(folder):
    assert functions.call_plainly("dataset", "os:getcwd") == str(folder)
    with pytest.raises(InputError, match="^--optimizer=math:sin is called without arguments, but"):
        functions.call_plainly("optimizer", "math:sin")
