"""`roostream train`: a model from files alone."""
