"""The owner's side: what this machine lends, to whom, and how it is taken back."""
