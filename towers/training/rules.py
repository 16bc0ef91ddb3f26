"""The rule book: what holds at any number of towers, printed at the start of each run."""

from collections import Counter

from towers.training.run import Run
from towers.training.update import OPTIMIZERS


def rule_book(run: Run) -> list[str]:
    """Return the rules as lines, with this run's numbers."""
    options, size, scale = run.options, run.data.train.size, run.masters.loss_scale
    towers = len(run.builder.devices)
    small, more = divmod(options.batch_size, towers)
    slices = Counter(small + (i < more) for i in range(towers))
    per_tower = " and ".join(f"{n} x {examples}" for examples, n in slices.items())
    weights = sum(v.value.shape.num_elements() for v in run.masters.model.trainable_variables)
    at_most = f", at most {options.max_steps} steps" if options.max_steps else ""
    _, decays_apart = OPTIMIZERS[options.optimizer]
    decay = f"{options.optimizer}, apart from the gradient" if decays_apart else "L2"
    scaled = ", not needed in this precision"
    if scale is not None:
        scaled = f"; loss scale from {scale.numpy():g}"
    clips = ("clip_norm", "clip_value", "clip_global_norm")
    clips = [f"{name}={limit}" for name in clips if (limit := getattr(options, name))]
    moments = "the global batch" if options.batch_norm == "sync" else "a tower's slice"
    parts = f" in {options.accumulate_steps} parts" if options.accumulate_steps > 1 else ""
    return [
        f"towers      {towers}: {', '.join(run.builder.devices)}; {_gather(run)}",
        f"batch size  {options.batch_size} global ({per_tower} per tower), {options.dtype}",
        f"data        {run.data.name}: {size} training examples per epoch, {run.data.test.size} "
        f"test; {size / options.batch_size:.1f} steps per epoch",
        f"model       {options.model}({options.model_args}): {weights} trainable weights",
        f"length      {run.total_examples} examples, {run.total_epochs:g} epochs{at_most}",
        "rules, the same at any number of towers:",
        "  1 loss and gradients: mean over the global batch; towers give sums, add_n gathers them",
        f"  2 regularisation: once, on the master weights; weight decay {options.weight_decay:g} "
        f"({decay}), and the layers' own",
        f"  3 finite test: on the gathered gradient{scaled}",
        f"  4 clipping: {', '.join(clips) or 'none'}, after the gather; then update, then EMA",
        "  5 shuffling, augmentation, dropout: by (seed, step, place in the global batch), "
        f"seed {options.seed}",
        f"  6 BatchNorm: {options.batch_norm}, moments over {moments}{parts}; statistics "
        "gathered, assigned once a step",
        f"  7 clock: examples; {options.optimizer}, learning rate {options.learning_rate:g} "
        f"{options.schedule}, EMA {options.ema_decay or 'none'}",
        "  8 the loss that is printed is that of all towers",
    ]


def _gather(run: Run) -> str:
    """Return where gradients are gathered, and variables lie."""
    return {
        "sharded": "each gradient is gathered on its variable's tower",
        "replicated": "gradients are summed by collectives, each tower has its variables",
    }.get(run.options.variables, f"gather on {run.builder.gather_device}")
