"""From a checkpoint to the static graph on disk, and the layout of the result."""
