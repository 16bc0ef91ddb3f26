"""Reading the graphs that TensorFlow executes."""
