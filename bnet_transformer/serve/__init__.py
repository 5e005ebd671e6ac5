"""The live page: a local web app in which a sentence is typed, and its bnet is computed, changed and compared.

Every request carries the complete state of the page, so the server has no sessions. `page_state` parses the state,
`sentences` builds its sentence, and `answers` computes the page, the lens and the patches; these three do not depend on
HTTP. `security` rejects foreign hosts, origins and tokens, and large bodies. `jobs` runs computations in threads and
cancels those whose result is no longer needed. `app` combines them; `server` listens on a
port, and `connections` limits the number and the time of connections.
"""
