"""Floor 3: where evicted KV goes. Host memory, disk and shared stores behind one small interface."""
