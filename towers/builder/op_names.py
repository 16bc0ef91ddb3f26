"""Reads an op's tower and layer from its name: Keras opens a name scope for each layer."""

import re

# Scopes that a tower, an inner function or a loop adds.
_OF_CALLS = (
    "PartitionedCall", "StatefulPartitionedCall", "while", "body", "cond", "gradient_tape",
    "seen_draw", "",
)  # fmt: skip
NO_LAYER = "the loss function itself"


def tower_of(name: str) -> int | None:
    """Return the number of the tower whose name scope an op is in, or None."""
    match = re.search(r"(?:^|/)tower_(\d+)(?:_\d+)?/", name)
    return int(match[1]) if match else None


def layer_of(name: str) -> str:
    """Return the layers whose name scopes an op is in, outermost first: "cnn/conv1"."""
    below = re.split(r"(?:^|/)tower_\d+(?:_\d+)?/", name)[-1]
    # TensorFlow makes a scope's name unique with a number.
    scopes = [re.sub(r"_\d+$", "", scope) for scope in below.split("/")[:-1]]
    return "/".join(scope for scope in scopes if scope not in _OF_CALLS) or NO_LAYER
