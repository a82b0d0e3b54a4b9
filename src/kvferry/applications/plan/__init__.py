"""`kvferry plan`: who would send what to whom, whether that is right, and a picture of it. Moves nothing.

`specification` reads what the operator wrote about a side, `study` plans and proves, `counting` counts runs and
descriptors, `report` shows the result as text and as data, `drawing` as a picture, `vector` lists every byte that
moves; `run` gives out what was asked for.
"""
