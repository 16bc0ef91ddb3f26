"""`towers init`."""
