"""The benchmark: ranks in processes of their own exchange made-up caches as fast as they can. Every byte is checked.

`arguments` are the command's options; `prepare` checks them and makes the `options` of every case. `memory` checks that
one fits, `storage` is one rank's memory, `pool` how it is divided and `pattern` what lies in it. `ranks` and `limits`
are what each process does, `commands` what is sent to it, `teams` starts and ends the processes of a side, `remote`
reaches a side on another machine, `measure` leads both through the rounds. `summary` takes medians, `report` and
`drawing` show them, `run` goes from the command to what is shown.
"""
