"""What every package uses and no user sees: torch's global state, hashing, several processes, deferred reads."""
