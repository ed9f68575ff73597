"""The catalogue of `docs/ops.md`: its definition in numpy and one implementation a device."""
