"""One request followed through the topics (`roostream trace`)."""
