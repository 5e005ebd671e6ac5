"""The live page: a local web app in which a sentence is typed, and its bnet is computed, changed and compared.

Every request carries the complete state of the page, so the server has no sessions. `answers` parses the state, builds
its sentence, and computes the page, the lens and the patches; it does not depend on HTTP. `server` listens on a port,
limits connections, rejects foreign hosts, origins and tokens, and runs computations in threads, which it cancels when
their result is no longer needed.
"""
