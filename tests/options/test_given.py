"""What a program gives in place of names: options stay texts, and each has its own functions."""

import copy
import dataclasses
import functools
import json
import pathlib

import pytest

from towers.errors import InputError
from towers.options.functions import load_function
from towers.options.run import Options

pytestmark = pytest.mark.unit


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


@pytest.mark.parametrize(
    "value, name",
    [
        (local(1), "build"),
        (lambda: 1, "lambda"),
        (functools.partial(build), "partial"),
        (type("Net", (), {}), "Net"),
    ],
)
def test_any_other_is_known_to_its_options_alone(value, name):
    options = Options(model=value)
    assert options.model == f"given_in_python:{name}"
    assert load_function("model", options.model) is value
    assert f"--model={options.model}" in options.to_flagfile().splitlines()
    with pytest.raises(InputError, match=f"--model=given_in_python:{name} was given in Python"):
        load_function("model", str(options.model))  # as flags.cfg has it


def test_two_functions_of_one_name_are_not_mixed_up():
    one, two = Options(model=local(1)), Options(model=local(2), dataset=local(3))
    again = dataclasses.replace(one, seed=1)
    copied = copy.deepcopy(one)
    assert [load_function("model", o.model)() for o in (one, two, again, copied)] == [1, 2, 1, 1]
    assert load_function("dataset", two.dataset)() == 3


def test_data_is_what_a_function_would_return():
    halves = ([1], [2]), ([3], [4])
    for data in (halves, list(halves), {"train": halves[0], "test": halves[1]}):
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


def test_each_item_of_a_list_may_be_a_function():
    one, two = lambda: 1, lambda: 2  # noqa: E731
    text = Options(devices=["mae", one, build, two, one]).devices
    lambdas = "given_in_python:lambda", "given_in_python:lambda_2"
    assert text == f"mae,{lambdas[0]},{__name__}:build,{lambdas[1]},{lambdas[0]}"
    found = [load_function("metrics", part)() for part in text.split(",")[1:]]
    assert found == [1, "built", 2, 1]


@pytest.mark.parametrize(
    "given",
    [dict(model=5), dict(model=None), dict(dataset=None), dict(devices=[None]), {"seed": []}],
)
def test_what_has_no_name_is_refused(given):
    (name,) = given
    with pytest.raises(InputError, match=f"{name}=.*needed"):
        Options(**given)
