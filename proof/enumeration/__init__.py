"""Every state that the protocol's machines can reach, enumerated: what a lossy medium can do to them, law by law."""
