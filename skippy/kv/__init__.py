"""What is remembered between requests: prefix identities, resident and exact caches, replay.

Nothing yet: the prefix cache is not built, and ``kv_cache`` in a configuration is refused.
Never here: sockets, HTTP, llama.cpp.
"""
