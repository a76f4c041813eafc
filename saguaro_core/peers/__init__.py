"""Other decoders on the same machine, prompts, cores and threads: what people use today, beside this engine.

Each peer runs in a child process of its own, so that one that is missing, fails or hangs costs its own row only and
its memory is measured alone. `compare` runs them, `report` makes the table.
"""
