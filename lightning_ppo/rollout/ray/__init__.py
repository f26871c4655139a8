"""What Ray runs for us: vLLM servers and reward workers. Nothing here imports Ray before a `RayRuntime` is started."""
