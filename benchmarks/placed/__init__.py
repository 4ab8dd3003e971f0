"""What the benchmarks of workers and devices share: runs under a plan, their phases, ceilings, idle workers."""
