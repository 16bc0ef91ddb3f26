"""How a run is set up, what it writes, and how it is loaded."""
