"""Infrastructure below all other packages: argument checks, names, files, hashing, torch state, several processes."""
