"""Models that users bring (docs/bring-your-own-model.md).

loading.py      a file or a package's module → its configuration class and function, told apart by the digest of its source
wrapped.py      its model among ours: what goes wrong in it is told in one sentence
torchrec_bags.py  TorchRec's EmbeddingBagCollection over rows that live on the shards
own_checks.py   what must hold for every model       example_requests.py   requests of any schema, to check it with
"""
