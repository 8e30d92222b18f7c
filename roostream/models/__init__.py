"""Models that trainer and serving both run, in torch. TorchRec is imported only by custom models
(custom/torchrec_bags.py).

Rows of embedding tables live on the parameter servers. A model gets the unique rows of a batch as a leaf
tensor, and their gradients are pushed back. All other parameters are dense.

    model.py              interface of a model                   inputs.py             batch + lookup + rows → tensors
    build.py              kinds of models; builds one            candidate_groups.py   candidates of requests, padded in groups
    config.py             settings                               feature_encoders.py   encoders of features; UserArch
    ranker.py             the late-stage ranker                  attention.py          target attention, list attention
    loss.py               multi-task loss and objectives         layers.py             MLP, initial values
    embedding_ops.py      gather and pool rows, with gradients   interaction_layers.py DCNv2, DHEN
    sampled_scores.py     products with sampled rows             ragged_attention.py   attention without padding, on a CPU
    simd.py               16 numbers at a time, for kernels      sequence/             HSTU, SASRec, next item
    two_tower/            retrieval, early-stage ranking         custom/               models that users bring
    compiled/             compiled scoring of the ranker in serving
"""
