"""The parameter server: embedding rows, their update rules, commits, publication, the client, and replicas.

Training imports `param_server.client`, serving `param_server.replica`. No torch.
"""
