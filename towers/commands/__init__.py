"""The verbs beside train and evaluate, a folder each."""
