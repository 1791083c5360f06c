"""Floor 3: where a request should go. Policies and the view of the fleet they decide on; no HTTP."""
