"""OpenAI over Quart: what application developers see.

Here live request schemas, prompting, text handling, the lane pool, the generation driver and the HTTP app.
Import the names that :mod:`skippy.embed` uses. Never here: engine internals, sockets of the stage protocol.
"""
