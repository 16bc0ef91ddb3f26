"""One run: model, master variables, update, step, loop and folder."""
