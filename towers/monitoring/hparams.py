"""What TensorBoard's HParams table holds of a run: its flags, and its final metrics.

A run is one row, whose name is that of its folder. So `tensorboard --logdir RUN` shows one row, and
--logdir of a folder of runs one for each. Nothing here needs TensorFlow.
"""

import time
from collections.abc import Collection, Mapping
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2
from tensorboard.plugins.hparams.summary_v2 import Metric, hparams_pb
from tensorboard.plugins.scalar.summary_v2 import scalar_pb

from towers.monitoring.results import number
from towers.options.run import Options, names_that_affect

# TensorBoard shows five columns of either kind, and the rest on a click.
_USUAL = ("batch_size", "learning_rate", "model", "num_towers", "optimizer")
OF_ALL = (  # of result.json, whatever the task
    "train_loss", "examples_per_second", "seconds_to_first_step", "steps", "examples",
    "test_examples", "gradient_noise_scale",
)  # fmt: skip


def hparams_of(options: Options, num_towers: int | None = None) -> dict[str, Any]:
    """Return {flag: value} of all flags that say what a run computes, and how.

    `num_towers` is how many were taken; None: as the flag says.
    """
    names = names_that_affect("result", "speed", "machine", "report")
    values = {name: getattr(options, name) for name in names}
    return values if num_towers is None else values | {"num_towers": num_towers}


def experiment(first: Collection[str], figures: Collection[str]) -> Summary:
    """Return the Summary that declares the table's columns, the flags in `first` before the others.

    `figures` are those of evaluations that result.json will have, as test_accuracy.
    TensorBoard takes them from one run of all those it shows, so that they must be the same in
    each; and a column with a set of values would hide the runs with others: none has one.
    """
    kinds = {str: api_pb2.DATA_TYPE_STRING, bool: api_pb2.DATA_TYPE_BOOL}
    first = [*first, *_USUAL][: max(len(first), len(_USUAL))]
    flags = [
        api_pb2.HParamInfo(
            name=name,
            type=kinds.get(type(value), api_pb2.DATA_TYPE_FLOAT64),
            description=Options.__dataclass_fields__[name].metadata["help"],
            differs=name in first,
        )
        for name, value in hparams_of(Options()).items()
    ]
    figures = [name for figure in figures for name in (figure, f"{figure}_ema")]
    columns = dict.fromkeys([*figures[:2], *OF_ALL[:2], *figures, *OF_ALL])
    metrics = [Metric(f"result/{name}", display_name=name).as_proto() for name in columns]
    declared = api_pb2.Experiment(
        hparam_infos=flags, metric_infos=metrics, time_created_secs=time.time()
    )
    return _summary(metadata.EXPERIMENT_TAG, experiment=declared)


def session_start(options: Options, num_towers: int) -> Summary:
    """Return the Summary with which a run's row starts: its flags."""
    own_row = ""  # else equal flags would make one row of two runs
    return hparams_pb(hparams_of(options, num_towers), trial_id=own_row)


def session_end(result: Mapping[str, Any]) -> list[Summary]:
    """Return the Summaries with which a run's row ends: its final metrics."""
    done = api_pb2.STATUS_SUCCESS
    end = plugin_data_pb2.SessionEndInfo(status=done, end_time_secs=time.time())
    evaluated = [name for name in result if name.startswith(("test_", "validation_"))]
    values = {name: number(result, name) for name in dict.fromkeys([*evaluated, *OF_ALL])}
    scalars = [scalar_pb(f"result/{n}", value) for n, value in values.items() if value is not None]
    return [*scalars, _summary(metadata.SESSION_END_INFO_TAG, session_end_info=end)]


def _summary(tag: str, **content: Any) -> Summary:
    """Return a Summary of the HParams plugin."""
    about = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(**content))
    return Summary(value=[Summary.Value(tag=tag, metadata=about, tensor=metadata.NULL_TENSOR)])
