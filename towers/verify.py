"""`towers verify`: N towers compute what one device computes, shown on the user's own model.

One run on one device and one with each number of towers make the same steps side by side, in
float64, so that rounding cannot hide a fault. After each step the loss, the gradients and all
master variables are compared; the next step starts everywhere from those of the one device.
"""

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers import data, devices
from towers.causes import likely_cause
from towers.options import Options
from towers.run import Run, assemble, one_line_errors
from towers.verb_options import VerifyOptions

TOLERANCE = 1e-9
# An array that is zero but for rounding has no digits of its own: it is measured by the largest of
# its kind.
FLOOR = 1e-6
_SHOWN = 12  # lines of the table
_KINDS = ("loss", "gradient", "model", "optimizer", "average")


class Lane:
    """One of the runs that are compared: its towers, its model, and where it is."""

    def __init__(
        self,
        options: Options,
        names: Sequence[str],
        dataset: data.Data,
        scaled: bool,
        python_seed: int | None = None,
    ):
        """Build the run.

        Args:
            options: of the run.
            names: one device for each tower.
            dataset: its data.
            scaled: whether there is a loss scale.
            python_seed: of Python's and NumPy's generators while the step is built.
        """
        self.run: Run = assemble(options, names, dataset, loss_scaling=scaled)
        self.num_towers = len(names)
        train_step = self.run.train_step()
        batches = dataset.train.train_batches(options.batch_size, seed=options.seed)
        if python_seed is not None:
            random.seed(python_seed)
            np.random.seed(python_seed)
        compiled = tf.function(train_step, autograph=False)
        self.step = compiled.get_concrete_function(*batches.element_spec)

    def variables(self) -> dict[str, np.ndarray]:
        """Return the master variables by name, those of the weights first."""
        return {name: v.numpy() for name, v in self.run.masters.variables().items()}

    def take(self, values: dict[str, np.ndarray]) -> None:
        """Set the master variables."""
        for name, variable in self.run.masters.variables().items():
            variable.assign(values[name])
        self.run.masters.spread()

    def make_step(self, batch: Sequence[tf.Tensor]) -> dict[str, np.ndarray]:
        """Make a step; return the loss, the gathered gradients, then the master variables."""
        with one_line_errors(self.run.options):
            metrics, gradients = self.step(*batch)
        found = {"loss": metrics["loss"].numpy()}
        for variable, gradient in zip(
            self.run.masters.model.trainable_variables, gradients, strict=True
        ):
            if gradient is not None:
                found[f"gradient/{variable.path}"] = tf.convert_to_tensor(gradient).numpy()
        return found | self.variables()


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far an array of one lane is from that of the reference.

    Attributes:
        num_towers: of the lane.
        step: 0 for the first; -1 for the initial variables.
        name: "loss", "gradient/conv1/kernel", "model/conv1/kernel", "optimizer/...".
        relative: largest absolute difference, relative to the array's largest value, or to a
            millionth of the largest of its kind, if that is more.
        ulps: the same in units of the last place of that value, in the array's own precision.
    """

    num_towers: int
    step: int
    name: str
    relative: float
    ulps: float


def verify(options: VerifyOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Compare runs with the towers of `options.num_towers` with one device.

    Returns:
        "passed"; "first_difference": None, or the first array that differs, by step and by order,
        with its "num_towers", "step", "name", "relative_difference" and likely "cause";
        "max_relative_difference": {"2": 1e-15}; "differences": {name: {"2": 1e-15}}; and with
        `float32` "ulps": {"2": 3.0}.

    Raises:
        InputError: the options cannot be had.
        RunError: the data set cannot be read.
    """
    numbers = options.tower_numbers()
    devices.configure(**dataclasses.asdict(options.gpu_options()))
    devices.try_out()
    names = devices.tower_devices(max(numbers), options.devices)
    dataset = load_data(options, say)
    exact = options.of_run(dtype="float64", num_towers=max(numbers))
    scaled = options.dtype == "mixed_float16"
    say(
        f"verify      {options.model} on {dataset.name}: {options.steps} steps of batch size "
        f"{options.batch_size} in float64, one device against {options.num_towers} towers"
    )
    found = list(compare(exact, names, numbers, dataset, options.steps, scaled, say))
    failed = [d for d in found if not d.relative <= TOLERANCE]
    result = {
        "passed": not failed,
        "first_difference": None,
        "max_relative_difference": by_number(found, numbers, "relative"),
        "differences": by_name(found, numbers),
    }
    for line in table(result, numbers):
        say(line)
    if failed:
        first = min(failed, key=lambda d: d.step)  # the order within a step is kept
        if first.step < 0:
            cause = "initial weights that no seed determines: make them by Keras' initializers"
        else:
            pair = names[: max(first.num_towers, 2)]
            cause = likely_cause(exact, pair, dataset, Lane, scaled)
        result["first_difference"] = {
            "num_towers": first.num_towers,
            "step": first.step,
            "name": first.name,
            "relative_difference": first.relative,
            "cause": cause,
        }
        when = f"at step {first.step}" if first.step >= 0 else "before the first step"
        say(
            f"FAILED      {first.name} is the first to differ, by {first.relative:.1e} {when} on "
            f"{first.num_towers} towers"
        )
        say(f"likely      {cause}")
    else:
        largest = max(result["max_relative_difference"].values())
        say(f"passed      the largest relative difference is {largest:.1e}, under {TOLERANCE:g}")
    if options.float32:
        own = options.of_run(num_towers=max(numbers))
        again = list(compare(own, names, numbers, dataset, options.steps, scaled, say))
        result["ulps"] = by_number(again, numbers, "ulps")
        relative = by_number(again, numbers, "relative")
        for number in map(str, numbers):
            say(
                f"{options.dtype:11} {number} towers: {result['ulps'][number]:.1f} units of the "
                f"last place, relative {relative[number]:.1e}"
            )
    return result


def load_data(options: Options, say: Callable[[str], None]) -> data.Data:
    """Load the data set; images drawn in code stand in for CIFAR-10 where that is not at hand.

    Towers compute the same as one device, or do not, whatever the images: nothing is downloaded.

    Raises:
        InputError: the data set cannot be had.
        RunError: the data set cannot be read.
    """
    name = options.dataset
    with one_line_errors(options):
        if name == "cifar10" and not data.is_there(name, options.data_dir or None):
            say("data        cifar10 is not at hand: shapes, drawn in code, stand in for it")
            return data.load("shapes")
        return data.load(name, options.data_dir or None, options.image_height_width())


def compare(
    options: Options,
    names: Sequence[str],
    numbers: Sequence[int],
    dataset: data.Data,
    num_steps: int,
    scaled: bool,
    say: Callable[[str], None],
) -> Iterator[Difference]:
    """Make steps on one device and on each number of towers, and yield all differences.

    They come by step, then by number of towers, then in the order of `Lane.make_step`.
    """
    plain = dataclasses.replace(options, variables="cpu", jit_compile=False)
    reference = Lane(plain, names[:1], dataset, scaled)
    lanes = [Lane(options, names[:number], dataset, scaled) for number in numbers]
    expected = reference.variables()
    for lane in lanes:
        yield from differences(lane.variables(), expected, lane.num_towers, -1)
    batches = dataset.train.train_batches(options.batch_size, seed=options.seed).take(num_steps)
    for step, batch in enumerate(batches):
        expected = reference.make_step(batch)
        for lane in lanes:
            yield from differences(lane.make_step(batch), expected, lane.num_towers, step)
            lane.take(expected)  # else chaos, at a high learning rate, makes much of rounding
        if step == 0:
            say(f"step 0      done on {len(lanes) + 1} runs, {num_steps - 1} to come")


def differences(
    found: dict[str, np.ndarray], expected: dict[str, np.ndarray], num_towers: int, step: int
) -> Iterator[Difference]:
    """Compare two dictionaries of arrays, one after the other."""
    largest: dict[str, float] = {}
    for name, array in expected.items():
        largest[kind_of(name)] = max(largest.get(kind_of(name), 0.0), _size(array))
    for name, array in expected.items():
        if name not in found or found[name].shape != array.shape:
            yield Difference(num_towers, step, name, float("inf"), float("inf"))
            continue
        wide = np.abs(found[name].astype(np.float64) - array.astype(np.float64))
        same = (found[name] == array) | (np.isnan(found[name]) & np.isnan(array))
        off = float(np.max(np.where(same, 0.0, wide), initial=0.0))
        off = float("inf") if np.isnan(off) else off
        scale = max(_size(array), FLOOR * largest[kind_of(name)])
        relative = off / scale if off and scale else off
        kept = array.dtype if array.dtype.kind == "f" else np.dtype(np.float64)
        ulps = off / float(np.spacing(np.asarray(scale, kept))) if off else 0.0
        yield Difference(num_towers, step, name, relative, ulps)
    for name in found.keys() - expected.keys():
        yield Difference(num_towers, step, name, float("inf"), float("inf"))


def kind_of(name: str) -> str:
    """Return "model" for "model/conv1/kernel"."""
    return name.partition("/")[0]


def by_number(found: Sequence[Difference], numbers: Sequence[int], what: str) -> dict[str, float]:
    """Return {"2": the largest difference on two towers}."""
    return {
        str(number): max((getattr(d, what) for d in found if d.num_towers == number), default=0.0)
        for number in numbers
    }


def by_name(found: Sequence[Difference], numbers: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return {name: {"2": its largest difference on two towers}}, the largest first."""
    result: dict[str, dict[str, float]] = {}
    for d in found:
        row = result.setdefault(d.name, dict.fromkeys(map(str, numbers), 0.0))
        row[str(d.num_towers)] = max(row[str(d.num_towers)], d.relative)
    return dict(sorted(result.items(), key=lambda item: -max(item[1].values())))


def table(result: dict[str, Any], numbers: Sequence[int]) -> list[str]:
    """Return the table: the largest of each kind, then the arrays that differ most."""
    columns = list(map(str, numbers))
    rows = result["differences"]
    width = max(len(name) for name in [*rows, "largest relative difference, towers:"])

    def line(name: str, values: Sequence[Any]) -> str:
        cells = [v if isinstance(v, str) else f"{v:.1e}" for v in values]
        return f"  {name:{width}}" + "".join(f"{cell:>10}" for cell in cells)

    lines = [line("largest relative difference, towers:", columns)]
    for kind in _KINDS:
        of_kind = [row for name, row in rows.items() if kind_of(name) == kind]
        if of_kind:
            label = kind if len(of_kind) == 1 else f"{kind}, of {len(of_kind)}"
            lines.append(line(label, [max(row[c] for row in of_kind) for c in columns]))
    lines.append("")
    for name, row in list(rows.items())[:_SHOWN]:
        lines.append(line(name, [row[c] for c in columns]))
    if len(rows) > _SHOWN:
        lines.append(f"  and {len(rows) - _SHOWN} more, none larger")
    return lines


def _size(array: np.ndarray) -> float:
    """Return the largest finite absolute value, 0 for none."""
    values = np.abs(array[np.isfinite(array)].astype(np.float64))
    return float(values.max(initial=0.0))
