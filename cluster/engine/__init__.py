"""The torch side of a worker: model loading, paged attention, KV tensors, sampling and the step loop."""
