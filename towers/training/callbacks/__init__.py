"""Callbacks for `model.fit`, reached as `towers.callbacks`.

model = towers.parallelize(model, num_towers=4)
callbacks = [towers.callbacks.TowerBoard("board"), towers.callbacks.ExactResume("saved")]
model.fit(x, y, epochs=10, callbacks=callbacks)
"""

from towers.training.callbacks.exact_resume import ExactResume
from towers.training.callbacks.tower_board import TowerBoard

__all__ = ["ExactResume", "TowerBoard"]
