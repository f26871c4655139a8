"""Streaming PPO with a separate critic for language models, as a PyTorch Lightning plugin."""
