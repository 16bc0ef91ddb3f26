"""Modules that connect to workers: TensorFlow loses what is then assigned to older variables.

`test_alone.py` runs them in a process of their own; one that is named runs where it is.
"""

ALONE = [
    "builder/test_cross_host.py", "training/test_data_on_workers.py",
    "commands/test_over_workers.py",
]  # fmt: skip
