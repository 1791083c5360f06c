"""Floor 4: what a request log says about prefix caching; no printing."""
