"""What one request moves: its pages, what is asked for, the blocks that follow, and what its cache depends on."""
