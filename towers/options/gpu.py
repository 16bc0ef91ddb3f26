"""Options of the GPUs that a process uses; TensorFlow is not imported."""

import dataclasses
import re

from towers.errors import InputError
from towers.options.fields import check_values, group

_MEMORY = ("per_process_gpu_memory_fraction", "gpu_memory_limit_mib", "allow_growth")
_gpus = group("GPUs", affects="machine", minimum=0)


@dataclasses.dataclass(frozen=True)
class GpuOptions:
    """Which GPUs a process uses, and how. The fields are flags of the same name."""

    visible_gpus: str = _gpus(
        "", "GPUs to use, by the driver's numbers in PCI bus order: 0,2; or by name: GPU-... or "
        "MIG-...; none for no GPU. The rest is hidden. Default: what CUDA_VISIBLE_DEVICES leaves.",
    )  # fmt: skip
    per_process_gpu_memory_fraction: float = _gpus(
        0.0, "Part of each visible GPU's total memory to take; 0: all that is free.", maximum=1,
        example=0.4,
    )  # fmt: skip
    gpu_memory_limit_mib: int = _gpus(
        0, "MiB of each visible GPU's memory to take; 0: all that is free.", example=4096
    )
    allow_growth: bool = _gpus(
        False, "Take GPU memory as it is needed, and not all of it at the start."
    )
    allow_soft_placement: bool = _gpus(
        True, "Let TensorFlow choose another device for an op that cannot run on its own."
    )
    tf32: bool = _gpus(
        True, "Let GPUs of compute capability 8.0 and above round the inputs of float32 products "
        "to TF32, 10 of their 23 bits, as TensorFlow does by default.", affects="result",
    )  # fmt: skip
    deterministic: bool = _gpus(
        False, "Let ops return the same bits for the same inputs, which takes slower kernels on "
        "GPUs; an op without one is an error, and seconds of towers are not measured.",
        affects="result",
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Raise InputError for values out of range and pairs that exclude each other."""
        check_values(self)
        self.chosen()

    def chosen(self) -> list[str] | None:
        """Return the entries of `visible_gpus`: [] for "none", None for ""."""
        if not self.visible_gpus:
            return None
        if self.visible_gpus.lower() == "none":
            return []
        entries = [entry.strip() for entry in self.visible_gpus.split(",")]
        if not all(re.fullmatch(r"\d+|GPU-[\w-]+|MIG-[\w/-]+", e, re.ASCII) for e in entries):
            raise InputError(
                f"--visible_gpus={self.visible_gpus}: numbers of GPUs are needed, as "
                "--visible_gpus=0,2, names as nvidia-smi -L shows them, or --visible_gpus=none"
            )
        entries = [str(int(entry)) if entry.isdecimal() else entry for entry in entries]
        return list(dict.fromkeys(entries))

    def demands(self) -> dict[str, object]:
        """Return {option: value} to set before TensorFlow starts, without defaults."""
        names = ("visible_gpus", *_MEMORY)
        return {name: value for name in names if (value := getattr(self, name))}
