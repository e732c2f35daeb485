"""Reports, comparisons, sweeps, throughput measurements and capacity planning."""
