"""The summary that a run prints: its settings, and those that hold for any number of towers."""

from collections import Counter

import keras

from towers.data import augment
from towers.devices.shown_names import shown_name
from towers.formatting import count
from towers.options.parts import UpdateOptions
from towers.training.run import loss_checks
from towers.training.run.optimizers import CLIPS, DECAY_APART
from towers.training.run.setup import RunContext
from towers.training.step.on_towers import idle_notes
from towers.training.step.step import Task
from towers.training.step.train_state import overrides


def run_summary(run: RunContext) -> list[str]:
    """Return the lines of the summary."""
    options, size = run.options, run.data.train.size
    towers, timetable = len(run.builder.devices), run.timetable()
    seen = timetable.examples(timetable.last_step)
    small, more = divmod(options.batch_size, towers)
    slices = Counter(small + (i < more) for i in range(towers))
    per_tower = " and ".join(f"{n} x {examples}" for examples, n in slices.items())
    weights = sum(v.value.shape.num_elements() for v in run.train_state.model.trainable_variables)
    update = _of_update(run.task.model, options if run.task.rate_is_set else None)
    every = options.checkpoint_every_steps
    regularly = f"every {every} steps{' or 5 minutes' if every else ''}, "
    sample = "the global batch" if options.batch_norm == "sync" else "each tower's slice"
    validation = run.data.validation
    held = f"{validation.size} validation, " if validation else ""
    parts = f", {options.accumulate_steps} microbatches" if options.accumulate_steps > 1 else ""
    gather = f"gather on {shown_name(run.builder.gather_device)}"
    if options.variables == "replicated" and towers > 1:
        gather = "collectives sum the gradients, each tower has its own variables"
    elif run.builder.gather_at_variables:
        gather = "each gradient is summed on its variable's tower"
    checks = f"towers are compared with one device (--check={options.check}); if they differ: "
    checks += options.on_inexact
    if run.builder.num_slices == 1:
        checks = "one tower, nothing to compare"
    as_stored = options.augment == "none" and not run.task.by_flags
    dtype = None if as_stored else options.input_dtype
    return [
        f"towers      {towers}: {', '.join(map(shown_name, run.builder.devices))}; {gather}",
        f"batch size  {options.batch_size} global ({per_tower} per tower), {options.dtype}",
        *(f"note        {note}" for note in idle_notes(options.batch_size, towers)),
        f"data        {run.data.name}: {size} training examples per epoch, {held}"
        f"{run.data.test.size} test; {size / options.batch_size:.1f} steps per epoch",
        *run.data.notes,
        *augment.describe(run.data, options.augment, dtype),
        f"model       {options.model}({options.model_args}): {weights} trainable weights",
        f"task        {_of_task(run.task)}",
        f"length      {count(timetable.last_step, 'step')}, {count(seen, 'example')}, "
        f"{seen / size:.4g} epochs",
        f"saved       {regularly if every else ''}at the end, and when stopped",
        "reproducibility settings, the same on any number of towers:",
        "  1 loss and gradients: mean over the global batch; add_n sums the towers' parts",
        f"  2 regularization: once, on the weights; {update['decay']}, and that of the layers",
        f"  3 NaN/Inf check: on the loss and the summed gradient{update['scale']}; "
        f"{options.on_nan} if not finite",
        f"  4 clipping: {update['clips'] or 'none'}, after the sum; then update, then EMA",
        "  5 shuffling, augmentation, dropout: from (seed, step, place in the global batch), "
        f"seed {options.seed}",
        f"  6 BatchNorm: {options.batch_norm}, statistics of {sample}{parts}; averages updated "
        "once a step",
        f"  7 schedules count {update['schedules']}, EMA {options.ema_decay or 'none'}",
        "  8 the printed loss is that of all towers",
        f"  9 exactness: {checks}",
    ]


def _of_task(task: Task) -> str:
    """Return a short description of the loss and the metrics."""
    loss = loss_checks.text_of_loss(getattr(task.model, "loss", None) or "its own")
    step = ", its own train_step" if overrides(task.model, "train_step") else ""
    metrics = [name for name in task.figures if name != "loss"]
    return f"loss {loss}; {', '.join(metrics) or 'no metrics'}{step}"


def _of_update(model: keras.Model, flags: UpdateOptions | None) -> dict[str, str]:
    """Return texts on "decay", "scale", "clips" and "schedules"; from flags if they set these."""
    scaled = getattr(model.optimizer, "dynamic_scale", None)
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    clips = {name: getattr(optimizer, name, None) for name in CLIPS.values()}
    decay = f"{getattr(optimizer, 'weight_decay', None) or 0:g}"
    schedules = f"steps; {getattr(optimizer, 'name', 'train_step')} uses its own learning rate"
    if flags:
        apart = flags.optimizer in DECAY_APART
        kind = f"{flags.optimizer}, decoupled" if apart else "L2"
        decay = f"{flags.weight_decay:g} ({kind})"
        rate = f"learning rate {flags.learning_rate:g} {flags.schedule}"
        schedules = f"examples; {flags.optimizer}, {rate}"
    return {
        "decay": f"weight decay {decay}",
        "scale": "" if scaled is None else f"; loss scale from {float(scaled.numpy()):g}",
        "clips": ", ".join(f"{name}={limit}" for name, limit in clips.items() if limit),
        "schedules": schedules,
    }
