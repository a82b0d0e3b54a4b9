"""The benchmark: ranks in processes of their own exchange made-up caches as fast as they can. Every byte is checked.

`options` says what is measured, `memory` whether it fits, `pool` is one rank's memory and `pattern` what lies in it.
`ranks` and `limits` are what each process does, `processes` starts, asks and ends them, `measure` leads them through
the rounds. `summary` takes medians, `report` and `drawing` show them, `run` goes from what was typed to what is shown.
"""
