"""`roostream plan`: how much of everything a deployment needs, from what benchmarks have measured."""
