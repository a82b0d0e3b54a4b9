"""Contracts with engines, checked on the sources of a release that is neither installed nor imported.

A release for CUDA is so checked on a machine without it. `sources` answers what contracts ask, `archives` and `index`
get the sources, `page` says what was found: `python -m proof.engine_contracts`.
"""
