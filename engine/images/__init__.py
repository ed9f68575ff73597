"""Images in prompts: what the processor of a checkpoint makes of them before the vision network reads them."""
