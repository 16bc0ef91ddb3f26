"""Callbacks for `model.fit`, reached as `towers.callbacks`.

model = towers.parallelize(model, num_towers=4)
model.fit(x, y, epochs=10, callbacks=[towers.callbacks.TowerBoard("board")])
"""

from towers.training.callbacks.tensorboard_callback import TowerBoard

__all__ = ["TowerBoard"]
