"""Statistics: pure functions on ndarrays with frozen results. Every random choice takes an `rng`."""
