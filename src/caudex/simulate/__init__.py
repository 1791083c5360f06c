"""Floor 4: a fleet in virtual time, on the real cache and the real routing policies."""
