"""The benchmark: ranks in processes of their own exchange made-up caches as fast as they can. Every byte is checked.

`options` says what is measured, `memory` whether it fits, `storage` is one rank's memory, `pool` how it is divided and
`pattern` what lies in it. `ranks` and `limits` are what each process does, `commands` what it is told, `teams` starts,
asks and ends the processes of a side, `remote` reaches a side on another machine, `measure` leads both through the
rounds. `summary` takes medians, `report` and `drawing` show them, `run` goes from what was typed to what is shown.
"""
