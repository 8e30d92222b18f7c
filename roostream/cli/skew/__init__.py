"""`roostream inspect skew`: find differences between the features that were scored and those that were
logged."""
