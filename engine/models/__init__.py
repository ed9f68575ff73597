"""Network definitions: what a checkpoint's config.json means, which tensors it needs, and the graph they make."""
