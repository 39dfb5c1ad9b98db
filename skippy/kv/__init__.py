"""What is remembered between requests: which token paths, where they are held, and which of them goes first.

``radix`` is a trie over tokens, ``paths`` has one for each namespace, ``cache`` is the index of a stage over
both, and ``policy`` says what is evicted. ``blocks`` keeps exported state in RAM and ``durable`` on disk,
``activations`` the boundary rows of prefills, ``replay`` the first tokens of answers. ``identity`` says who
can read a state. Nothing here waits or computes: a stage asks, acts on its engine, and tells. Never here:
trio, sockets, HTTP, llama.cpp.
"""
