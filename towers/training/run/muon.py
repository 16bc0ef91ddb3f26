"""Muon for image models: orthogonal updates of kernels with a fixed norm.

    optimizer = Muon(learning_rate=0.24, momentum=0.6, outputs=["logits/kernel"])

An update of Muon has singular values near 1. Keras implements it for matrices; here the kernel of a
convolution, `[h, w, C_in, C_out]`, is a matrix of `h w C_in` rows. Before each step a kernel is
scaled to the norm of a matrix with columns of norm 1. So in every layer, the learning rate is the
part of a kernel that a step replaces. In front of a normalization layer the norm of a kernel has no
effect.

Biases, scales, embeddings and output kernels are updated by Adam, at `ADAM_RATIO` of the rate.

Source: Jordan et al. 2024, Muon: an optimizer for hidden layers in neural networks; the norms as in
the CIFAR-10 records of the same author, which update the smaller weights by SGD.
"""

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

ADAM_RATIO = 0.15
_NUM_ITERATIONS = 3  # of Newton-Schulz; more did not help in the source's records


@keras.saving.register_keras_serializable(package="towers")
class Muon(keras.optimizers.Muon):
    """`keras.optimizers.Muon` for kernels of any rank, with fixed norms."""

    def __init__(
        self,
        learning_rate: float = 0.24,
        momentum: float = 0.6,
        weight_decay: float = 0.0,
        outputs: Iterable[str] = (),
        **common: Any,
    ):
        """Set the constants.

        Args:
            learning_rate: the part of a kernel that a step replaces.
            momentum: of the gradients of kernels, by Nesterov's rule.
            weight_decay: decoupled weight decay of the variables that Adam updates.
            outputs: paths of the kernels that Adam updates.
            **common: `clipnorm` and the other arguments of all Keras optimizers.
        """
        super().__init__(
            learning_rate,
            momentum=momentum,
            adam_beta_2=0.99,
            adam_lr_ratio=ADAM_RATIO,
            weight_decay=None,
            adam_weight_decay=weight_decay,
            ns_steps=_NUM_ITERATIONS,
            **common,
        )
        self.outputs = frozenset(outputs)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        constants = {"momentum": self.momentum, "weight_decay": self.adam_weight_decay}
        common = keras.optimizers.Optimizer.get_config(self)
        return {**common, **constants, "outputs": sorted(self.outputs)}

    def _should_use_adamw(self, variable: keras.Variable) -> bool:
        embedding = self.exclude_embeddings and "embedding" in variable.path.lower()
        return len(variable.shape) < 2 or embedding or variable.path in self.outputs

    def _muon_update_step(
        self, gradient: tf.Tensor, variable: keras.Variable, lr: tf.Tensor, m: keras.Variable
    ) -> None:
        moved = self.momentum * m + gradient
        self.assign(m, moved)
        rows = tf.reshape(gradient + self.momentum * moved, [-1, variable.shape[-1]])
        turn = tf.reshape(self.zeropower_via_newtonschulz5(rows, self.ns_steps), variable.shape)
        norm = tf.maximum(tf.norm(variable), 1e-7)  # a kernel of zeros has norm 0
        self.assign(variable, variable * (variable.shape[-1] ** 0.5 / norm) - lr * turn)

    def zeropower_via_newtonschulz5(self, x: tf.Tensor, steps: int) -> tf.Tensor:
        """Return the matrix `x` with singular values near 1, see `keras.optimizers.Muon`.

        Each iteration multiplies by a polynomial of the Gram matrix. These polynomials, which are
        small, are multiplied with each other first: half the arithmetic for a 3x3 kernel.
        """
        x /= tf.norm(x) + 1e-7
        tall = x.shape[0] > x.shape[1]
        gram = tf.matmul(x, x, transpose_a=tall, transpose_b=not tall)
        product = None
        for _ in range(steps):
            factor = self.muon_b * gram + self.muon_c * gram @ gram
            factor = tf.linalg.set_diag(factor, tf.linalg.diag_part(factor) + self.muon_a)
            product = factor if product is None else product @ factor
            gram @= factor @ factor  # these matrices commute
        return x @ product if tall else product @ x
