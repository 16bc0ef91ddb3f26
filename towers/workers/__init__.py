"""Towers on other machines: TensorFlow servers there, which one program has at a time.

Other rooms come here by `towers.devices.remote`.
"""
