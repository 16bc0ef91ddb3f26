"""`towers export`."""
