"""`--init_from`: initial weights from another run, matched by their path in the model and by shape.

Seeds stay those of the new run.
"""

from pathlib import Path

from towers.errors import InputError
from towers.formatting import first_of
from towers.training.load import averages_in, read_weights
from towers.training.step.train_state import TrainState, by_unique_name, variables_of

_MOST_NAMES = 10  # weights that the line names


def init_from(train_state: TrainState, source: str) -> str:
    """Initialize a model's weights, frozen ones too, and their averages from another run.

    Args:
        train_state: of a run before its first step.
        source: the folder of a run, whose averages are preferred.

    Returns:
        A line that says how many weights were loaded, and names those that were not.

    Raises:
        InputError: there is no such run, or it has no weight of this model.
    """
    folder, model = Path(source).expanduser(), train_state.model
    if not folder.is_dir():
        raise InputError(
            f"--init_from={source} is not the folder of a run; the weights of a file are for the "
            "model function to load: model.load_weights(FILE, skip_mismatch=True)"
        )
    try:
        step, values = read_weights(folder)
    except InputError as error:
        raise InputError(str(error).replace("--train_dir", "--init_from", 1)) from None
    averages = averages_in(values)
    named = by_unique_name((f"model/{v.path}", v) for v in variables_of(model))
    shapes = {name: tuple(variable.shape) for name, variable in named.items()}
    fitting = {
        id(named[name]): value
        for name, value in (values | averages).items()
        if shapes.get(name) == value.shape
    }
    missing = [variable.path for variable in model.weights if id(variable) not in fitting]
    loaded = len(model.weights) - len(missing)
    if not loaded:
        raise InputError(
            f"--init_from={source} has no weight of this model, which needs "
            f"{first_of(missing, _MOST_NAMES)}"
        )
    for variable in model.weights:
        if id(variable) in fitting:
            variable.assign(fitting[id(variable)])
    for variable, average in train_state.averages:
        average.assign(variable.value)
    train_state.set_copies()
    kind = "averages" if averages else "weights"
    of_all = f"{loaded} of {len(model.weights)} weights"
    line = f"init_from   {source}, its {kind} at step {step}: {of_all}"
    return f"{line}; not loaded: {first_of(missing, _MOST_NAMES)}" if missing else line
