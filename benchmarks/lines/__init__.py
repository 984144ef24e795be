"""One small training run, as each library has it written: ``python -m benchmarks.lines``."""
