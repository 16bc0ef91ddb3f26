"""The final activation of a model's outputs."""

import keras

from towers import tf_internals

_LINEAR = keras.activations.linear


def output_ending(model: keras.Model) -> tuple[str | None, str]:
    """Return the final activation of a model's single output, and the layer that has it.

    It is "softmax", "sigmoid", "linear", or None: another, or unknown, as that of a model with
    several outputs. Activations inside of a user's own layer or of a subclassed model's `call` are
    not found, except that of the layer that was made last.
    """
    outputs = getattr(model, "outputs", None)
    if not outputs:  # a subclassed model
        layer = model.layers[-1] if model.layers else None
        if isinstance(layer, keras.Model):
            return output_ending(layer)
        return _name(getattr(layer, "activation", layer)), ""
    tensor = outputs[0]
    while len(outputs) == 1:
        layer, place, inputs = tf_internals.maker_of(tensor)
        inner = layer.layer if isinstance(layer, keras.layers.TimeDistributed) else layer
        if isinstance(layer, keras.Model):
            if not getattr(layer, "outputs", None):
                return output_ending(layer)
            tensor = layer.outputs[place]
        elif isinstance(inner, keras.layers.Activation) and inner.activation is _LINEAR:
            tensor = inputs[0]
        else:
            return _activation(inner), inner.name
    return None, ""


def _activation(layer: keras.Operation) -> str | None:
    is_keras = type(layer).__module__.startswith("keras.")
    activation = getattr(layer, "activation", layer) if is_keras else layer
    if activation is _LINEAR:  # a constraint may make it one of probabilities
        return "linear" if getattr(layer, "kernel_constraint", None) is None else None
    if activation is layer and getattr(layer, "axis", -1) != -1:
        return None
    return _name(activation)


def _name(activation: object) -> str | None:
    name = getattr(activation, "__name__", type(activation).__name__).lower()
    return name if name in ("softmax", "sigmoid") else None
