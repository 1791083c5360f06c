"""Floor 4: a model, its KV pool, the scheduler and the loop that runs them; no HTTP."""
