"""The commands. `app` has the command line, each command's work lies in a module of its own."""

from kvferry.cli.app import main

__all__ = ["main"]
