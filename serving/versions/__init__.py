"""Model versions: followed from the store, loaded, chosen per request, compared by shadow scoring and
interleaving."""
