"""Floor 1: what models and GPUs weigh. KV bytes a token, parameters, memory, bandwidth; nothing about requests."""
