"""Makes a directory a verified copy of a model: where its files are, how they travel, what has arrived."""
