"""From a decode rank's demand to the blocks that move, and their places in its pages."""
