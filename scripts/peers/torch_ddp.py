"""Peer: PyTorch DistributedDataParallel, one process a device; one device is plain PyTorch.

    python scripts/peers/torch_ddp.py CONFIG_JSON       the lane protocol, see lane.py

Follows PyTorch's "Getting Started with DistributedDataParallel" and "Performance Tuning Guide". CPU
processes use gloo and share the cores' threads evenly; GPUs use nccl. It uses channels_last,
gradients set to None and views of the buckets, a static graph, fused optimizers, autocast for
bfloat16. This process is rank 0, and tells the others by a pipe when to make a loop of steps.
torch.compile is not used: for the CNN on one CPU thread it took 0.91 of the time with
LocalResponseNorm, and was no faster without. Images of a file lie in memory, on the device, and are
augmented a batch at a time. The loss that is reported is that of rank 0's slice, without the
penalty, which is the optimizer's weight decay.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection

import lane

with lane.package("torch"):
    import torch
    import torch_models
    from torch import distributed, multiprocessing, nn
    from torch.nn import functional
    from torch.optim import swa_utils

PADDING = 4  # pixels on each side, "resnet"


def make_loop(config: lane.Config, rank: int) -> Callable[[], torch.Tensor]:
    """Return a function that makes `steps_per_loop` steps and returns the last loss."""
    device = torch.device(f"cuda:{rank}" if config.gpus else "cpu")
    model = plain = torch_models.make_model(config).to(device)
    if config.num_devices > 1:
        # BatchNorm's statistics stay those of each process: sending them before each step costs
        # time, and a checkpoint would hold those of rank 0 in either case.
        model = nn.parallel.DistributedDataParallel(
            plain, gradient_as_bucket_view=True, static_graph=True, forward_sync_buffers=False
        )
    optimizer = make_optimizer(config, plain)
    average = None
    if config.ema_decay:
        average = swa_utils.AveragedModel(
            plain, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(config.ema_decay)
        )
    next_batch = make_batches(config, rank, device)
    mixed = config.dtype == "mixed_bfloat16"
    # SGD's weight decay is the penalty's gradient, AdamW's is not.
    in_loss = torch_models.penalties(plain, config) if config.optimizer == "adamw" else {}

    def step() -> torch.Tensor:
        images, labels = next_batch()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16) if mixed else contextlib.nullcontext():
            logits = model(images)
        loss = functional.cross_entropy(logits.float(), labels)
        penalty = sum(
            decay / 2 * parameter.square().sum()
            for decay, parameters in in_loss.items()
            for parameter in parameters
            if decay
        )
        (loss + penalty).backward()
        optimizer.step()
        if average is not None:
            average.update_parameters(plain)
        return loss.detach()

    def loop() -> torch.Tensor:
        for _ in range(config.steps_per_loop - 1):
            step()
        return step()

    return loop


def make_optimizer(config: lane.Config, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer, with a parameter group for each weight decay."""
    if config.optimizer == "adamw":
        groups: dict[float, list] = {0.0: [], config.weight_decay: []}
        for parameter in model.parameters():
            groups[config.weight_decay if parameter.ndim > 1 else 0.0].append(parameter)
    else:
        groups = torch_models.penalties(model, config)
    groups = [{"params": params, "weight_decay": decay} for decay, params in groups.items()]
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=config.learning_rate, eps=1e-7, fused=True)
    return torch.optim.SGD(
        groups,
        lr=config.learning_rate,
        momentum=0.0 if config.optimizer == "sgd" else config.momentum,
        nesterov=config.optimizer == "nesterov",
        fused=True,
    )


def make_batches(config: lane.Config, rank: int, device: torch.device) -> Callable:
    """Return a function that returns the next images `[b, C, H, W]` and labels of this process."""
    size = config.slice_size()
    rows = slice(rank * size, (rank + 1) * size)
    if not config.data:
        images, labels = (torch.from_numpy(array[rows]) for array in lane.synthetic_batch(config))
        batch = images.to(device).permute(0, 3, 1, 2), labels.long().to(device)
        return lambda: batch
    images, labels = (torch.from_numpy(array).to(device) for array in lane.stored_images(config))
    labels = labels.long()
    order = torch.Generator().manual_seed(config.seed)  # the same in all processes
    torch.manual_seed(config.seed + rank)

    def batches():
        while True:
            shuffled = torch.randperm(len(labels), generator=order).to(device)
            for start in range(0, len(labels) - config.batch_size + 1, config.batch_size):
                chosen = shuffled[start:][: config.batch_size][rows]
                yield augmented(images, chosen, config.augment), labels[chosen]

    return batches().__next__


def augmented(images: torch.Tensor, chosen: torch.Tensor, kind: str) -> torch.Tensor:
    """Cut a batch out of `images` `[N, H, W, C]` uint8, augmented: `[b, C, h, w]`, channels_last.

    The tutorial's brightness adds a number to all of an image, which standardizing takes away
    again: it is left out.
    """
    b, (_, height, width, _), device = len(chosen), images.shape, images.device
    batch = images[chosen]
    if kind in ("tutorial", "resnet"):
        if kind == "tutorial":
            new_height, new_width = max(1, height * 3 // 4), max(1, width * 3 // 4)
        else:
            batch = functional.pad(batch, (0, 0, PADDING, PADDING, PADDING, PADDING))
            new_height, new_width = height, width
        top = torch.randint(batch.shape[1] - new_height + 1, [b, 1], device=device)
        left = torch.randint(batch.shape[2] - new_width + 1, [b, 1], device=device)
        across = torch.arange(new_width, device=device)
        mirrored = torch.rand([b, 1], device=device) < 0.5
        columns = left + torch.where(mirrored, new_width - 1 - across, across)
        lines = top + torch.arange(new_height, device=device)
        pixel = torch.arange(b, device=device)[:, None, None]
        batch = batch[pixel, lines[:, :, None], columns[:, None, :]]
    x = batch.float()
    if kind == "tutorial":
        contrast = torch.empty([b, 1, 1, 1], device=device).uniform_(0.2, 1.8)
        mean = x.mean((1, 2), keepdim=True)
        x = (x - mean) * contrast + mean
    if kind != "off":
        deviation, mean = torch.std_mean(x, (1, 2, 3), correction=0, keepdim=True)
        x = (x - mean) / deviation.clamp(min=x[0].numel() ** -0.5)
    return x.permute(0, 3, 1, 2)


def start(config: lane.Config, rank: int, store: str) -> Callable:
    """Join the other processes and build what `make_loop` returns."""
    if config.gpus:
        torch.cuda.set_device(rank)
        torch.backends.cudnn.benchmark = True
    else:
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // config.num_devices))
    if config.num_devices > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all processes are on this machine
        distributed.init_process_group(
            "nccl" if config.gpus else "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=config.num_devices,
        )
    return make_loop(config, rank)


def follow(config: lane.Config, rank: int, store: str, pipe: Connection) -> None:
    """Be rank 1, 2, ...: make a loop of steps whenever rank 0 does."""
    loop = start(config, rank, store)
    while pipe.recv():
        loop()
    pipe.send(lane.peak_memory_mib())
    distributed.destroy_process_group()


def program(config: lane.Config) -> None:
    """Start the other processes and train as the lane protocol asks."""
    config.require(dtype=("float32", "mixed_bfloat16"))
    config.slice_size()
    if config.gpus and torch.cuda.device_count() < config.num_devices:
        raise lane.Skipped(
            f"num_devices={config.num_devices} with gpus, and PyTorch sees "
            f"{torch.cuda.device_count()}"
        )
    torch_models.make_model(config)  # is skipped before any process starts
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store, pipes = os.path.join(folder, "store"), []
        for rank in range(1, config.num_devices):
            near_end, far_end = context.Pipe()
            context.Process(target=follow, args=(config, rank, store, far_end), daemon=True).start()
            far_end.close()
            pipes.append(near_end)
        loop = start(config, 0, store)
        with lane.Lane(config, {"torch": torch.__version__}) as turns:
            loss = None
            while turns.more(loss):
                for pipe in pipes:
                    pipe.send(True)
                loss = loop()
            for pipe in pipes:
                pipe.send(False)
                turns.memory_of_others_mib += pipe.recv()
        if pipes:
            distributed.destroy_process_group()


if __name__ == "__main__":
    lane.run(program)
