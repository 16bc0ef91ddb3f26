"""What a run is asked to be: options, flags and their rules. No TensorFlow is needed."""
