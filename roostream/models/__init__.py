"""Models that trainer and serving both run: torch; TorchRec only where a user's model asks for it (own/torchrec_bags.py).

Rows of embedding tables live on the parameter servers: a model gets the batch's unique rows as a leaf tensor and gives
their gradients back. Everything else that is learned is a dense parameter of the model.

    model.py    what a model is to others                         inputs.py            batch + lookup + rows → tensors
    build.py    the kinds of models, and making one               candidate_groups.py  candidates of a request, padded in groups
    config.py   settings                                          parts.py             what a model is put together from
    ranker.py   the late-stage ranker                             attention.py         target attention, list attention
    loss.py     multi-task loss; objectives.py: of what kinds     layers.py            layers, initial values
    gather.py   rows by their numbers, pooled or not, and back    chosen_parts.py      which parts a configuration asks for
    lanes.py     sixteen numbers at a time, for kernels            ragged_attention.py  attention without padding, on a CPU
    sampled_scores.py  products with rows drawn for each vector
    user_arch.py  request-only embeddings compressed once a request
    sequence/   HSTU over history and targets; SASRec             interaction/         DCNv2, DHEN
    two_tower/  retrieval and early-stage ranking    own/                 models that users bring: loaded, held to the rules
"""
