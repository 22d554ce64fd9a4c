"""From a model, a cluster and a memory budget to the fastest plan that fits."""
