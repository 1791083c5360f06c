"""Floor 3: where KV blocks go besides the pool. Host memory, disk and shared stores behind one small interface.

A store (`BlockStore`) keeps bytes by key; it knows neither models nor tokens. A `Tier` is a store with what makes it
safe and worth asking: checked records, a thread that writes, pauses after failures, running estimates. A `TierStack`
asks several in order. The engine decides which blocks to offer and when to ask.
"""
