"""The first contact with a GPU: what is worth knowing of a machine that is there for a quarter of an hour.

    python -m benchmarks.gpu_contact.wheels --to .gpu-wheels                    # here: wheels to take along
    PYTHONPATH=src python -m benchmarks.gpu_contact --part 1 --out contact      # there; --dry-run says what it would do

`sections` is the list of what is asked, `running` asks each question in a process group of its own with a limit and a
log, `page` writes down the answers after every one of them, `archive` brings all of it back in one file, `wheels` fills
the folder and unpacks it again. `probes` are programs of their own: each measures one thing, prints a line of JSON,
and runs on a CPU as well, with `--device cpu --tiny`, so that all but the figures can be right before there is a GPU.
"""
