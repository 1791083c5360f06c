"""Floor 4: a model, its KV pool, the scheduler and the loop that runs them; no HTTP.

Import from the modules: `caudex.engine.config`, `caudex.engine.types` and `caudex.engine.engine`. Nothing here imports
PyTorch until a model is loaded, so that a command line stays quick.
"""
