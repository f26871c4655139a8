"""How policy weights reach the engines."""
