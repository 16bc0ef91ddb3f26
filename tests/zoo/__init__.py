"""A catalogue of small models as strangers write them, each with the truth about it.

N towers compute what one device computes, or `towers verify` names the one cause why they do not,
or the model is refused. `scripts/catalogue` tries them all, and so does `scripts/test --all`; a
normal run of the tests tries the quick ones, one of each truth.
"""

import importlib
from dataclasses import replace

from tests.zoo.entry import CAUSES, MODULES, REFUSED, SAME, Entry, found

__all__ = ["CAUSES", "ENTRIES", "MODULES", "REFUSED", "SAME", "Entry", "found"]

_OF_MODELS = "convolutions norms sequences draws programs state mixing faults applications"


def _entries(module: str) -> list[Entry]:
    models = vars(importlib.import_module(f"{MODULES}.{module}")).items()
    return [
        replace(entry, model=f"{module}:{name}")
        for name, model in models
        for entry in getattr(model, "entries", [])
    ]


ENTRIES = [entry for module in _OF_MODELS.split() for entry in _entries(module)]
