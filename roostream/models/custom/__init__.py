"""Models that users bring (docs/bring-your-own-model.md): loading, checks, TorchRec's "
"EmbeddingBagCollection."""
