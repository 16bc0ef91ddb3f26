"""`towers verify`."""
