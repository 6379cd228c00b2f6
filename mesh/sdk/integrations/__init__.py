"""Training frameworks as jobs: `hf` is for the Hugging Face Trainer, `lightning` for Lightning; each needs only `mesh.job`.

`joblib` is for who submits: what joblib calls in parallel, as jobs.
"""
