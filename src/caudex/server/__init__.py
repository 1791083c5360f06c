"""Floor 5: the OpenAI-compatible HTTP face of the engine."""
