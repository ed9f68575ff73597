"""Export of a checkpoint to a static graph on disk, and the layout of the result."""
