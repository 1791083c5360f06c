"""Floor 4: a model, its KV pool, the scheduler and the loop that runs them; no HTTP.

`config`, `types`, `loading` and `tokenizer` are quick to import; `engine` brings PyTorch with it.
"""
