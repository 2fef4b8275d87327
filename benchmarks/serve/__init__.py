"""A load generator for servers that speak OpenAI's format, and for comparing engines with different connectors."""
