"""Models that users bring (docs/bring-your-own-model.md).

loading.py         a file or a package's module → its configuration class and function, checked by source digest
model_checks.py    properties that every model must have, checked on example requests
torchrec_bags.py   TorchRec's EmbeddingBagCollection over rows on the parameter servers
"""
