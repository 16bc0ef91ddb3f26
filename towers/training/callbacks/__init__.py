"""Callbacks for `model.fit`, reached as `towers.callbacks`.

model = towers.parallelize(model, num_towers=4)
callbacks = [towers.callbacks.TowerBoard("board"), towers.callbacks.ExactResume("saved")]
model.fit(x, y, epochs=10, callbacks=callbacks)
"""

from towers.training.callbacks.backup_and_restore import ExactResume
from towers.training.callbacks.tensorboard_callback import TowerBoard

__all__ = ["ExactResume", "TowerBoard"]
