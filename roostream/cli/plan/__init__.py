"""`roostream plan`: the sizes that a load needs. `roostream placement`: owners of embedding rows."""
