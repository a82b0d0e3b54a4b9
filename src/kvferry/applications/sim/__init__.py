"""`kvferry sim`: schedules of a simulated system, one to look at or many to search."""
