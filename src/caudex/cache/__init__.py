"""Floor 2: the prefix cache. Blocks, namespaces, eviction policies, stats, events; nothing about models or HTTP."""
