"""Floor 4: what a request log says about prefix caching; no printing.

`caudex.analyze` does it all. The parts are modules of their own: `measure` (one
pass over a log), `curves` (capacity, policy, block size, tiers), `breakers` (what keeps equal prefixes from matching),
`kv_size` and `decision`.
"""
