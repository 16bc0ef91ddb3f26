"""`towers sweep`."""
