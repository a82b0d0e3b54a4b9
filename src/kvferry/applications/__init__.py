"""What stands on the library: each command's options and work in a package of its own. `cli` puts them together.

`demo` runs a real transformers model on both sides, `bench` measures, `plan` explains, `doctor`, `top` and `trace` look
at what runs, `up` starts a deployment of a real engine. `partner` is how commands on two machines talk. Nothing of the
library imports them.
"""
