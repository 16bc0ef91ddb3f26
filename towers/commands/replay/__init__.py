"""`towers replay`."""
