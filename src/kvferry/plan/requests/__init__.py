"""What one request moves: its pages, what a decode rank asks for, and the blocks that follow from both."""
