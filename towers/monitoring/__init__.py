"""The output of a run on the terminal and in TensorBoard."""
