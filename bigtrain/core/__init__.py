"""The contract of strategies, the plain loop, replicas, the table of techniques."""
