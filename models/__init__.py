"""Keras models as plain functions: `--model=models.resnet:resnet20`."""
