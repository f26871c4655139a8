"""From prompts to chunks: rewards, engines, collector, replay, samplers, data module."""
