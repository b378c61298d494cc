"""Training of EAGLE3 drafts: on-policy text, captured hidden states, the training loop, the exported checkpoint."""
