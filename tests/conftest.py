"""Settings of the whole suite."""

from __future__ import annotations

from hypothesis import settings

# Examples share their cores with whatever else runs: how long one took says nothing about the code. A failure prints
# what reproduces it on another machine.
settings.register_profile("kvferry", deadline=None, print_blob=True)
settings.load_profile("kvferry")
