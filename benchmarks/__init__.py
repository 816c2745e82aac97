"""Time and memory of one private gradient, dpbench beside other libraries: `python -m benchmarks`."""
