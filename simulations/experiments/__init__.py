"""Many runs: compare, curve, and the engine that keeps each outcome."""
