"""What models of the zoo share: a small network around the layers that an entry is about.

    spectral = on_maps(SAME, "why", lambda: [layers.Conv2D(4, 3), Special()])
    other = on_rows(SAME, "why", Special)

The layers get what the name says: `images` [B, 8, 8, 3], `maps` [B, 6, 6, 4], `rows` [B, 8, 4], or
`features` [B, 6].
"""

import inspect

import keras

from tests.zoo.entry import entry

layers = keras.layers


def _around(before, after):
    """Return what makes an entry of layers that stand between others."""

    def put(expected, why, make, flags="", **keywords):
        """Make a model of the layer, or the list of layers, that `make()` returns."""

        @entry(expected, why, flags, **keywords)
        def model(num_classes, image_shape):
            made = make()
            middle = made if isinstance(made, list) else [made]
            every = [*before(), *middle, *after(), layers.Dense(num_classes)]
            return keras.Sequential([keras.Input(image_shape), *every])

        return model

    return put


def _rows():
    return [layers.Reshape((8, -1)), layers.Dense(4, activation="tanh")]


def _maps():
    return [layers.Conv2D(4, 3, activation="tanh")]


def _features():
    return [layers.Flatten(), layers.Dense(6, activation="tanh")]


on_images = _around(list, lambda: [layers.Flatten()])
on_maps = _around(_maps, lambda: [layers.GlobalAveragePooling2D()])
on_rows = _around(_rows, lambda: [layers.Flatten()])
on_features = _around(_features, list)


def of_images(expected, why, flags="", **keywords):
    """Return a decorator that makes a model of a function of Keras' images, and a dense head."""

    def decorate(function):
        @entry(expected, why, flags, **keywords)
        def model(num_classes, image_shape):
            images = keras.Input(image_shape)
            features = layers.Flatten()(function(images))
            return keras.Model(images, layers.Dense(num_classes)(features))

        return model

    return decorate


def layer(**has):
    """Return a decorator that makes a class of layers of a function of `(layer, x[, training])`.

    A layer has what is given by name: weights by their shape, in which None is the last size of
    the inputs, or by all arguments of `add_weight`; layers and others by functions that make them.
    """

    def decorate(function):
        learns = "training" in inspect.signature(function).parameters

        class Own(layers.Layer):
            def __init__(self):
                super().__init__()
                for name, make in has.items():
                    if callable(make):
                        setattr(self, name, make())

            def build(self, shape):
                for name, what in has.items():
                    if callable(what):
                        if isinstance(getattr(self, name), layers.Layer):
                            getattr(self, name).build(shape)
                    else:
                        given = what if isinstance(what, dict) else {"shape": what}
                        size = [n or shape[-1] for n in given["shape"]]
                        weight = self.add_weight(**given | {"shape": size, "name": name})
                        setattr(self, name, weight)

            def call(self, x, training=False):
                return function(self, x, training) if learns else function(self, x)

        return Own

    return decorate


def own(on, expected, why, flags="", quick=False, under_fit="", before=list, then=list, **has):
    """Return a decorator that puts such a layer in between those of `before()` and `then()`."""

    def decorate(function):
        make = layer(**has)(function)
        middle = lambda: [*before(), make(), *then()]  # noqa: E731
        return on(expected, why, middle, flags, quick=quick, under_fit=under_fit)

    return decorate


def seed():
    """Return a generator for a layer that draws."""
    return keras.random.SeedGenerator(1)


def kept(start="zeros", shape=(), **keywords):
    """Return the arguments of a weight that is not trained."""
    return {"shape": shape, "initializer": start, "trainable": False} | keywords


class Seeded(layers.Layer):
    """A layer that draws from a generator of its own."""

    def __init__(self, **keywords):
        super().__init__(**keywords)
        self.seed = seed()
