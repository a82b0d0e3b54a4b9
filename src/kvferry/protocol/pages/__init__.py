"""What callers hand in: page numbers, chunk by chunk, and as they travel."""
