"""What every bench shares: the results' columns and files, machine facts, one way of timing. Imports no GPU library."""
