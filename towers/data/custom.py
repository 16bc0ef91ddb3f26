"""The user's own data: `--dataset=module:function`.

The function takes no argument and returns the halves, with the number of classes or without:

    def load():  # in my_data.py; --dataset=my_data:load
        return (train_x, train_y), (test_x, test_y)

It may also return `(train, validation, test)`, either with a number of classes behind it, or a dict
`{"train": ..., "validation": ..., "test": ...}`. What a half may be, `towers.data.halves` says.
"""

import numbers
from collections.abc import Mapping

from towers.data import halves
from towers.data.arrays import describe
from towers.data.pipeline import Data
from towers.errors import InputError
from towers.options.functions import call_plainly

_ALLOWED_RESULT = (
    "return (train, test), (train, test, num_classes), (train, validation, test) or a dict of "
    'these, {"train": ..., "test": ...}'
)


def load(dataset: str) -> Data:
    """Call the user's function and check what it returns, see `halves.data_set`.

    Raises:
        InputError: the module or the function is not there, or what the function returned is not
            data to train on. What the function itself raises is left as it is.
    """
    given, num_classes = _halves(dataset, call_plainly("dataset", dataset))
    return halves.data_set(dataset, given, num_classes)


def _halves(dataset: str, result: object) -> tuple[Mapping[str, object], object]:
    """Return {"train": ..., "test": ...} and the number of classes, None if there is none."""
    wrong = InputError(f"{dataset} returned {describe(result)}; {_ALLOWED_RESULT}")
    if isinstance(result, dict):
        if not {"train", "test"} <= set(result) <= set(halves.NAMES):
            raise InputError(f"{dataset} returned a dict of {list(result)}; {_ALLOWED_RESULT}")
        return result, None
    if not isinstance(result, tuple | list) or not result:
        raise wrong
    *given, last = result
    num_classes = last if isinstance(last, numbers.Number) else None
    given = given if isinstance(last, numbers.Number) else result
    if len(given) not in (2, 3):
        raise wrong
    names = ("train", "test") if len(given) == 2 else halves.NAMES
    return dict(zip(names, given, strict=True)), num_classes
