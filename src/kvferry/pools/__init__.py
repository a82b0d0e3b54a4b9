"""Paged pools in plain memory, with known contents: what commands and tests fill, transfer and check byte by byte."""
