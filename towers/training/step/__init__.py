"""From a batch to the update of the weights."""
