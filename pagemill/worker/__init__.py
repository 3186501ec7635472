"""One rank: its device, its model, its KV cache (worker), one step (model_runner), its memory plan."""
