"""Generation by vLLM servers. The trainer's process never imports vLLM."""
