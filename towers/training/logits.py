"""Whether a model gives probabilities where the loss takes logits: read from its last layer."""

import keras

from towers.training.run import Run


def notes(run: Run) -> list[str]:
    """Return a line for a model that ends in a softmax or a sigmoid, none for any other."""
    found = final_activation(run.masters.model)
    if found is None:
        return []
    return [
        f"warning     {run.options.model} ends in a {found}, and the loss takes logits, of which "
        f"it takes the softmax itself: it will learn badly; take the {found} off the last layer"
    ]


def final_activation(layer: keras.Operation | None) -> str | None:
    """Return "softmax" or "sigmoid" for a model whose last layer is one, or has it, else None.

    An activation in the middle of a layer or model of the user's own is not seen.
    """
    while isinstance(layer, keras.Model):
        parts = getattr(layer, "operations", layer.layers)  # of a functional model, ops too
        layer = parts[-1] if parts else None
    activation = getattr(layer, "activation", layer)
    name = getattr(activation, "__name__", type(activation).__name__).lower()
    return name if name in ("softmax", "sigmoid") else None
