"""Tools that read models and run folders: reports, comparisons, throughput."""
