"""The model: a function that returns a Keras model."""

import keras


def build(num_classes, image_shape, width=16):
    """Return a classifier of images `[B, H, W, C]`.

    Args:
        num_classes: comes from the data.
        image_shape: comes from the data.
        width: channels of the first convolution, to be set as --model_args=width=32.
    """
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Conv2D(width, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(2 * width, 3, padding="same", activation="relu"),
            layers.GlobalMaxPooling2D(),
            layers.Dense(num_classes),  # logits: the softmax is part of the loss
        ]
    )
    # For another task than this, compile the model before you return it: its loss, metrics and
    # optimizer then say what is trained, as model.compile(optimizer="adam", loss="mse").
