"""`towers benchmark`."""
