"""The demo: a real transformer prefills on some ranks, its cache crosses to others, and they decode from it.

`arguments` are the command's options; `prepare` checks them and makes `options` of them. `pool` is one rank's paged
memory, `ranks` what each process does, `run` starts the processes and collects what they report, `verdict` judges it
and `report` shows it.
"""
