"""`towers predict`."""
