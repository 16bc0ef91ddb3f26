"""What a run shows, on the terminal and in TensorBoard."""
