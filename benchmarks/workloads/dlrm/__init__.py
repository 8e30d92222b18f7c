"""TorchRec's DLRM, over the shards' rows and over TorchRec's own."""
