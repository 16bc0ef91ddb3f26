"""Convolutions and pooling of all kinds. N towers compute what one device computes."""

import keras
import tensorflow as tf

from tests.zoo.parts import on_maps

layers = keras.layers


def first_cnn(num_classes, image_shape):
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Conv2D(4, 3, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(6, 3, padding="same"),
            layers.BatchNormalization(),
            layers.Activation("relu"),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(num_classes),
        ]
    )


def depthwise_separable(num_classes, image_shape):
    return on_maps(
        num_classes,
        image_shape,
        layers.DepthwiseConv2D(3, depth_multiplier=2, padding="same"),
        layers.BatchNormalization(),
        layers.SeparableConv2D(5, 3, activation="relu"),
    )


def u_net(num_classes, image_shape):
    inputs = keras.Input(image_shape)
    down = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    x = layers.Conv2D(6, 3, strides=2, padding="same", activation="relu")(down)
    x = layers.Conv2DTranspose(4, 3, strides=2, padding="same")(x)
    x = layers.LeakyReLU(0.1)(layers.Concatenate()([x, down]))
    x = layers.Conv2D(num_classes, 1)(x)
    return keras.Model(inputs, layers.GlobalAveragePooling2D()(x))


def dilated(num_classes, image_shape):
    return on_maps(
        num_classes,
        image_shape,
        layers.Conv2D(4, 3, dilation_rate=2, padding="same", activation="elu"),
        layers.DepthwiseConv2D(3, dilation_rate=2, padding="same"),
    )


def resnext_block(num_classes, image_shape):
    inputs = keras.Input(image_shape)
    x = shortcut = layers.Conv2D(4, 3, use_bias=False)(inputs)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.Conv2D(4, 3, groups=2, padding="same", use_bias=False)(x)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.Add()([shortcut, layers.Conv2D(4, 1)(x)])
    return keras.Model(inputs, layers.Dense(num_classes)(layers.GlobalMaxPooling2D()(x)))


def groups_of_three(num_classes, image_shape):
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Conv2D(6, 3, groups=3, activation="relu"),
            layers.Conv2D(6, 3, groups=3, strides=2),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(num_classes),
        ]
    )


def one_dimension(num_classes, image_shape):
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Reshape((-1, image_shape[-1])),
            layers.Conv1D(4, 5, padding="causal", activation="relu"),
            layers.MaxPooling1D(4),
            layers.SeparableConv1D(5, 3, activation="relu"),
            layers.Conv1DTranspose(3, 3, strides=2),
            layers.AveragePooling1D(2),
            layers.SpatialDropout1D(0.3),
            layers.GlobalMaxPooling1D(),
            layers.Dense(num_classes),
        ]
    )


def three_dimensions(num_classes, image_shape):
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Reshape((4, 4, 4, image_shape[-1])),
            layers.Conv3D(4, 2, strides=(1, 1, 2), activation="relu"),
            layers.BatchNormalization(),
            layers.SpatialDropout3D(0.3),
            layers.Conv3DTranspose(3, 2),
            layers.GlobalAveragePooling3D(),
            layers.Dense(num_classes),
        ]
    )


def poolings(num_classes, image_shape):
    inputs = keras.Input(image_shape)
    x = layers.Conv2D(4, 3, activation="relu")(inputs)
    pooled = [
        layers.AveragePooling2D(3, strides=1, padding="same")(x),
        layers.MaxPooling2D(2, strides=1, padding="same")(x),
    ]
    x = layers.Maximum()([*pooled, x])
    x = layers.Concatenate()([layers.GlobalMaxPooling2D()(x), layers.GlobalAveragePooling2D()(x)])
    return keras.Model(inputs, layers.Dense(num_classes)(x))


def adaptive_pooling(num_classes, image_shape):
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Conv2D(4, 3, activation="relu"),
            layers.AdaptiveAveragePooling2D(4),
            layers.AdaptiveMaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(num_classes),
        ]
    )


def squeeze_excite(num_classes, image_shape):
    inputs = keras.Input(image_shape)
    x = layers.Conv2D(6, 3)(inputs)
    gate = layers.GlobalAveragePooling2D(keepdims=True)(x)
    gate = layers.Conv2D(2, 1, activation="swish")(gate)
    x = layers.Multiply()([x, layers.Conv2D(6, 1, activation="hard_sigmoid")(gate)])
    return keras.Model(inputs, layers.Dense(num_classes)(layers.Flatten()(x)))


class LayerScale(layers.Layer):
    def build(self, shape):
        constant = keras.initializers.Constant(0.1)
        self.gamma = self.add_weight(shape=(shape[-1],), initializer=constant, name="gamma")

    def call(self, x):
        return x * self.gamma


def convnext_block(num_classes, image_shape):
    inputs = keras.Input(image_shape)
    x = layers.LayerNormalization()(layers.Conv2D(6, 2, strides=2)(inputs))
    for _ in range(2):
        y = layers.DepthwiseConv2D(3, padding="same")(x)
        y = layers.Dense(12, activation="gelu")(layers.LayerNormalization(epsilon=1e-6)(y))
        y = LayerScale()(layers.Dense(6)(y))
        x = layers.Add()([x, layers.Dropout(0.3, noise_shape=(None, 1, 1, 1))(y)])
    return keras.Model(inputs, layers.Dense(num_classes)(layers.GlobalAveragePooling2D()(x)))


def dense_block(num_classes, image_shape):
    x = inputs = keras.Input(image_shape)
    for _ in range(3):
        y = layers.Activation("relu")(layers.BatchNormalization(epsilon=1.001e-5)(x))
        x = layers.Concatenate()([x, layers.Conv2D(2, 3, padding="same", use_bias=False)(y)])
    return keras.Model(inputs, layers.Dense(num_classes)(layers.GlobalAveragePooling2D()(x)))


def inverted_residual(num_classes, image_shape):
    inputs = keras.Input(image_shape)
    x = layers.Conv2D(4, 3, strides=2, padding="same", use_bias=False)(inputs)
    y = layers.Conv2D(12, 1, use_bias=False)(x)
    y = layers.ReLU(6.0)(layers.BatchNormalization(momentum=0.999)(y))
    y = layers.DepthwiseConv2D(3, padding="same", use_bias=False)(y)
    y = layers.Activation("hard_swish")(layers.BatchNormalization()(y))
    x = layers.Add()([x, layers.BatchNormalization()(layers.Conv2D(4, 1, use_bias=False)(y))])
    return keras.Model(inputs, layers.Dense(num_classes)(layers.GlobalAveragePooling2D()(x)))


def inception_block(num_classes, image_shape):
    inputs = keras.Input(image_shape)

    def conv(x, filters, size):
        x = layers.Conv2D(filters, size, padding="same", use_bias=False)(x)
        return layers.Activation("relu")(layers.BatchNormalization(scale=False)(x))

    pooled = layers.AveragePooling2D(3, strides=1, padding="same")(inputs)
    branches = [conv(inputs, 2, 1), conv(conv(inputs, 2, 1), 3, 3), conv(pooled, 2, 1)]
    x = layers.Concatenate()([*branches, conv(conv(inputs, 2, (1, 3)), 2, (3, 1))])
    return keras.Model(inputs, layers.Dense(num_classes)(layers.GlobalAveragePooling2D()(x)))


def padded_and_resized(num_classes, image_shape):
    return on_maps(
        num_classes,
        image_shape,
        layers.ZeroPadding2D(1),
        layers.UpSampling2D(2, interpolation="bilinear"),
        layers.Conv2D(3, 3, strides=3),
        layers.Cropping2D(1),
        layers.PReLU(),
    )


class WeightStandardisedConv(layers.Conv2D):
    def convolution_op(self, inputs, kernel):
        mean, variance = tf.nn.moments(kernel, axes=[0, 1, 2], keepdims=True)
        return super().convolution_op(inputs, (kernel - mean) / tf.sqrt(variance + 1e-5))


def weight_standardised(num_classes, image_shape):
    return on_maps(num_classes, image_shape, WeightStandardisedConv(5, 3), layers.ReLU())


class ByTensorFlow(layers.Layer):
    """Convolution, patches and pooling by TensorFlow's own functions."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(3, 3, shape[-1], 4), name="kernel")

    def call(self, x):
        x = tf.nn.conv2d(x, self.kernel, strides=1, padding="SAME")
        x = tf.nn.max_pool2d(x, 2, 2, "SAME")
        patches = tf.image.extract_patches(x, [1, 2, 2, 1], [1, 1, 1, 1], [1, 1, 1, 1], "VALID")
        return tf.nn.depth_to_space(patches, 2)


def by_tensorflow(num_classes, image_shape):
    return on_maps(num_classes, image_shape, ByTensorFlow())
