"""`towers worker`."""
