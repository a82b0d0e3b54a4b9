"""Rooms by number on a prefill rank: which message is for which use of a number."""
