"""`towers plan`."""
