"""Child processes that work on what strangers have written, and the parent's side of them.

A job that loops, recurses or eats memory ends a child, never the server. A leaf: a child imports as little as
possible, so that it starts quickly.
"""
