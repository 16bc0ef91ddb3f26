"""`towers tensorboard`."""
