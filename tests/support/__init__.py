"""What several tests share: caches filled by definition, endpoints in one process, transports with faults."""
