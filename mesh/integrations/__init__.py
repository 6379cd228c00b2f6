"""Training frameworks as jobs: `hf` is for the Hugging Face Trainer, `lightning` for Lightning; each needs only `mesh.job`."""
