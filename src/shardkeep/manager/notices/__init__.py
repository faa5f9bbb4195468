"""Who announces that a machine will be taken away, and how to ask: one module per service."""
