"""The command line: `app` puts together the commands of `applications`."""

from kvferry.cli.app import main

__all__ = ["main"]
