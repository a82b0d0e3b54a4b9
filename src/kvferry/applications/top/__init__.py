"""`kvferry top`: endpoints and rooms, as they go along."""
