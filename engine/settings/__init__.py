"""The settings: environment variables, read once, checked once."""
