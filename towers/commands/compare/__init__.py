"""`towers compare`."""
