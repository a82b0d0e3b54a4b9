"""A decode rank's link to a prefill engine, and what proves that a lost rank has ended."""
