"""Infrastructure of all other packages: argument checks, names, files, hashing, torch state, distributed runs."""
