"""Pictures and histograms of a run, made between its steps.

What goes wrong in making one is a line: a run is worth more than its pictures. What cannot be
written, as on a full disk, ends the run as it would without them.
"""

from collections.abc import Callable, Iterable, Sequence

import keras
from tensorboard.compat.proto.summary_pb2 import Summary

from towers.builder.tower import TowerBuilder
from towers.monitoring import pictures
from towers.monitoring.monitor import Monitor
from towers.monitoring.samples import Batch, Sampler, seen_by_towers
from towers.options.timetable import Timetable
from towers.text import first_line


class Gallery:
    """Shows what towers see, what they got wrong, and how weights and gradients lie."""

    def __init__(
        self,
        monitor: Monitor,
        timetable: Timetable,
        sampler: Sampler,
        draw_histograms: Callable[[Batch | None], Summary],
        builder: TowerBuilder,
        model: keras.Model,
        class_names: Sequence[str],
    ):
        """Show the first pictures: a data set that has one reader at a time is read here."""
        self._monitor, self._timetable = monitor, timetable
        self._sampler, self._draw_histograms = sampler, draw_histograms
        self._builder, self._model, self._class_names = builder, model, class_names
        self._failed: set[str] = set()
        self._shown: set[tuple[str, int]] = set()
        self.show_training(timetable.first_step)
        if timetable.options.histogram_every_epochs:
            self.show_histograms(timetable.first_step)

    def show_training(self, step: int) -> None:
        """Show the batch after `step` updates as the towers see it, and the first filters."""
        self._show("pictures", step, lambda: self._of_training(step))

    def show_histograms(self, step: int) -> None:
        """Show how weights, gradients and activations lie after `step` updates."""
        self._show("histograms", step, lambda: [self._draw_histograms(self._batch(step))])

    def show_evaluation(self, step: int, predictions: pictures.Predictions) -> None:
        """Show what an evaluation after `step` updates got wrong."""
        names = self._class_names
        self._show("mistakes", step, lambda: pictures.of_evaluation(predictions, names), "eval")

    def _of_training(self, step: int) -> list[Summary]:
        found, batch, options = [], self._batch(step), self._timetable.options
        if batch is not None:
            seen = seen_by_towers(self._builder, options, batch, pictures.NUM_IMAGES)
            stretch = options.augment != "off"
            found += pictures.of_towers(seen, self._class_names, batch.step, stretch)
        return found + pictures.filters(self._model)

    def _batch(self, step: int) -> Batch | None:
        return self._sampler.batch(step, self._timetable.examples(step))

    def _show(
        self, what: str, step: int, make: Callable[[], Iterable[Summary]], part: str = "train"
    ) -> None:
        """Show what `make` returns, once for a step; say a line, once, if it fails."""
        if (what, step) in self._shown:
            return
        self._shown.add((what, step))
        with self._monitor.pause():
            try:
                summaries = make()
            except Exception as error:  # of any kind: the user's own code may be in it
                summaries = []
                if what not in self._failed:
                    self._failed.add(what)
                    self._monitor.say(f"no {what} {type(error).__name__}: {first_line(error)}")
            self._monitor.show(step, summaries, part)
