"""Floor 5: a load client for any OpenAI-compatible endpoint."""
