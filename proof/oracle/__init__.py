"""An independent oracle: what every byte of every rank must be, by definition, and a ferry that it judges."""
