"""Soak and fault tests: what is promised of killed runs, full disks, damaged files, memory, threads and company.

    python -m tests.soak --times 50 --markdown docs/soak.md

Each file is a room of probes. A probe is a function of a `Setup` that returns what it `Found`: what was done how often,
what was to hold, and every try in which it did not, with the seed that repeats it.
"""
