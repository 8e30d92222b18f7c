"""What a rank request costs beside other ways to serve it.

serving_batch.py        the request's side once, and repeated for each candidate
serving_framework.py    without a model: ours, FastAPI with Pydantic, a bare route
"""
