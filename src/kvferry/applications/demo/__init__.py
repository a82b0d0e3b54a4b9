"""The demo: a real transformer prefills on some ranks, its cache crosses to others, and they decode from it.

`options` has the command's options, and checks them. `ranks` is what each process does, with paged memory of its own,
`run` starts the processes and collects what they report, `verdict` judges it and `report` shows it.
"""
