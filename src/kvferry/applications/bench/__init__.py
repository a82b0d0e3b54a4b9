"""The benchmark: ranks in processes of their own exchange made-up caches as fast as they can. Every byte is checked.

`options` has the command's options, checks them and makes those of every case. `pool` is one rank's memory, how it is
divided and whether it fits, `pattern` what lies in it. `ranks` and `limits` are what each process does,
`commands` what is sent to it, `teams` starts and ends the processes of a side, `remote` reaches a side on another
machine, `measure` leads both through the rounds. `summary` takes medians, `report` shows them, `run` goes from the
command to what is shown.
"""
