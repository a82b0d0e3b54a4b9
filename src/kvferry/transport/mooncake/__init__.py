"""Moves bytes with Mooncake's transfer engine."""
