"""The demo: a real transformer prefills on some ranks, its cache crosses over NIXL, and others decode from it.

`options` says what to run, `pool` is one rank's paged memory, `ranks` what each process does, `run` starts the
processes and collects what they report, `verdict` judges it and `report` shows it.
"""
