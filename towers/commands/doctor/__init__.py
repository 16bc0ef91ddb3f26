"""`towers doctor`."""
