"""Options of a run, their flags and their rules; no TensorFlow is imported."""
