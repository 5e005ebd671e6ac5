"""Infrastructure of all other packages.

`checks` of arguments, `naming` of nodes and the words that they read (`Reach`), `tokens` and their labels, `tensors`,
`stats` (bootstrap, permutation tests, comparisons of results), `results` (the base of results, and their files),
`files` and hashing, `process` (torch state, memory) and `distributed` runs.
"""
