"""One small module for each library that is measured. Loaded in worker processes alone, and only where installed."""
